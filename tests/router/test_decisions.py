from __future__ import annotations

from headrace.core.routing import Route
from headrace.router.decisions import Decisions, Entry, Seen


def entry(name: str, caller: str = "", attempt: int = 0, chosen: str = "r0") -> Entry:
    route = Route(
        request_id=name, caller_id=caller, model="m", num_prompt_tokens=100, attempt=attempt, exclude=[]
    )
    seen = [Seen("r0", 0.5, 0.4, 64, 1000, 3, 2, 0.25)]
    return Entry(route, 1000.0, "predicted_ttft", seen, [("r1", "full")], chosen, "lowest score", 0.1)


def test_found_by_both_ids_with_all_that_was_seen() -> None:
    decisions = Decisions()
    one = entry("q1", "c1")
    decisions.add(one)
    one.ttft_s, one.num_cached_tokens, one.outcome = 0.3, 96, "finished"
    (found,) = decisions.find("c1")
    assert decisions.find("q1") == [found]
    assert decisions.find("q2") == []
    assert (found.chosen, found.reason, found.policy, found.at) == (
        "r0",
        "lowest score",
        "predicted_ttft",
        1000.0,
    )
    assert (found.ttft_s, found.num_cached_tokens, found.outcome) == (0.3, 96, "finished")
    first, second = found.candidates
    assert (first.replica_id, first.score, first.ttft_s, first.num_cached_tokens) == ("r0", 0.5, 0.4, 64)
    assert (first.num_queued_tokens, first.num_in_flight, first.num_running) == (1000, 3, 2)
    assert (first.kv_cache_usage, first.excluded) == (0.25, "")
    assert (second.replica_id, second.excluded) == ("r1", "full")


def test_all_attempts_are_kept_in_order() -> None:
    decisions = Decisions()
    for attempt, chosen in enumerate(["r0", "r1", "r2"]):
        decisions.add(entry("q", "c", attempt, chosen))
    assert [d.chosen for d in decisions.find("c")] == ["r0", "r1", "r2"]
    latest = decisions.latest("q")
    assert latest is not None and latest.chosen == "r2"


def test_one_caller_id_for_several_requests() -> None:
    decisions = Decisions()
    decisions.add(entry("q1", "same"))
    decisions.add(entry("q2", "same"))
    assert [d.request_id for d in decisions.find("same")] == ["q1", "q2"]


def test_both_ids_alike_are_one_decision() -> None:
    decisions = Decisions()
    decisions.add(entry("q", "q"))
    assert len(decisions.find("q")) == 1


def test_the_oldest_are_forgotten_with_their_names() -> None:
    decisions = Decisions(3)
    for i in range(10):
        decisions.add(entry(f"q{i}", "c" if i % 2 else ""))
    assert len(decisions) == 3
    assert [bool(decisions.find(f"q{i}")) for i in range(10)] == [False] * 7 + [True] * 3
    assert [d.request_id for d in decisions.find("c")] == ["q7", "q9"]
    assert set(decisions._by_id) == {"q7", "q8", "q9", "c"}
