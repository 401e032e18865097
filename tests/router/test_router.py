"""The router as gateways, replicas and the supervisor see it."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from headrace.core.errors import UnavailableError
from headrace.core.messages import CacheSnapshot, Stats
from headrace.core.routing import Endpoint, Lease, Placement
from headrace.router.breaker import FAULTS
from headrace.router.registry import SUSPECT_S
from tests.router.routing import (
    BLOCK,
    OURS,
    TEXT,
    VLLM,
    add,
    fill,
    make,
    place,
    poll,
    release,
    route,
    stored,
    up,
)

# Cache-aware placement


def test_goes_where_its_prefix_is() -> None:
    router = make(3)
    router.on_events("r1", 0, [stored(1, 2, 3)], 0.0)
    placement = router.place(route("q", 1, 2, 3, 4), 0.0, 0.0)
    assert placement is not None
    assert (placement.replica_id, placement.num_cached_tokens) == ("r1", 3 * BLOCK)


def test_the_last_token_is_never_cached() -> None:
    router = make(1)
    router.on_events("r0", 0, [stored(1, 2)], 0.0)
    placement = router.place(route("q", 1, 2, tokens=2 * BLOCK), 0.0, 0.0)
    assert placement is not None and placement.num_cached_tokens == 2 * BLOCK - 1


def test_requests_in_flight_count_at_once() -> None:
    """A burst spreads although no replica has said anything yet, and equal prompts stay together."""
    router = make(4)
    long = 5_000
    assert Counter(place(router, f"q{i}", tokens=long) for i in range(8)) == {f"r{i}": 2 for i in range(4)}
    router = make(4)
    same = list(range(1, 100))
    homes = {place(router, f"q{i}", *same) for i in range(4)}
    assert len(homes) == 1, "the second one will find what the first one computes"


def test_what_will_not_be_computed_is_not_counted_on() -> None:
    router = make(2)
    numbers = list(range(1, 100))
    home = place(router, "one", *numbers)
    release(router, "one", "aborted")
    placement = router.place(route("two", *numbers), 0.0, 0.0)
    assert placement is not None and placement.num_cached_tokens == 0
    assert home == "r0"


def test_a_system_prompt_of_all_does_not_pull_all_to_one_replica() -> None:
    router = make(4, num_blocks=1000)
    shared = list(range(1, 40))
    seqs = Counter[str]()
    where = Counter[str]()
    now = 0.0
    for i in range(200):
        own = [1000 + 20 * i + j for j in range(20)]
        name = f"q{i}"
        home = place(router, name, *shared, *own, now=now)
        assert home is not None
        where[home] += 1
        router.on_events(home, seqs[home], [stored(*shared, *own)], now)
        seqs[home] += 1
        router.began(name, 0.4, 0, now + 0.4)
        router.release(name, "finished", 50, 1.0, now + 1.5)
        now += 2.0  # nothing is ever queued: load alone would not spread them
    assert min(where[f"r{i}"] for i in range(4)) > 25, where


def test_a_conversation_stays() -> None:
    router = make(4)
    homes: dict[int, str] = {}
    seqs = Counter[str]()
    now = 0.0
    for turn in range(1, 6):
        for talk in range(12):
            name = f"t{talk}-{turn}"
            numbers = [1000 * (talk + 1) + i for i in range(10 * turn)]
            home = place(router, name, *numbers, now=now)
            assert home is not None
            assert homes.setdefault(talk, home) == home
            router.on_events(home, seqs[home], [stored(*numbers)], now)
            seqs[home] += 1
            router.began(name, 0.1, 0, now + 0.1)
            router.release(name, "finished", 20, 0.5, now + 0.6)
            now += 1.0
    assert set(Counter(homes.values()).values()) == {3}, "twelve conversations over four replicas"


def test_session_without_known_blocks_stays() -> None:
    router = make(3)
    home = place(router, "a0", session="s")
    for i in range(1, 5):
        release(router, f"a{i - 1}")
        for j in range(i):  # others come between
            place(router, f"o{i}-{j}")
            release(router, f"o{i}-{j}")
        assert place(router, f"a{i}", session="s") == home


def test_guesses_for_servers_without_cache_events() -> None:
    router = make(2, capabilities=VLLM)
    home = place(router, "one", *range(1, 20))
    router.began("one", 0.2, 0, 0.2)
    release(router, "one", now=1.0)
    placement = router.place(route("two", *range(1, 20), 99), 2.0, 0.0)
    assert placement is not None
    assert (placement.replica_id, placement.num_cached_tokens) == (home, 19 * BLOCK)
    release(router, "two", now=3.0)
    router.poll(10_000.0, 0.0)
    placement = router.place(route("three", *range(1, 20)), 10_000.0, 0.0)
    assert placement is not None and placement.num_cached_tokens == 0, "guesses age"
    router.check_integrity()


def test_guesses_end_when_the_server_begins_to_tell() -> None:
    router = make(1, capabilities=VLLM)
    place(router, "one", 1, 2, 3)
    up(router, "r0", msgspec.structs.replace(VLLM, cache_events=True))
    (status,) = router.status().replicas
    assert status.num_indexed_blocks == 0
    release(router, "one")


def test_text_is_matched_by_its_chunks() -> None:
    router = make(2, capabilities=TEXT)
    home = place(router, "one", 1, 2, 3, 4, tokens=400, text_only=True)
    placement = router.place(route("two", 1, 2, 9, 8, tokens=400, text_only=True), 0.0, 0.0)
    assert placement is not None
    assert (placement.replica_id, placement.num_cached_tokens) == (home, 200)


# Who may be chosen


def test_no_replica_of_the_model() -> None:
    router = make(1)
    with pytest.raises(UnavailableError, match="other has no replica: it is scaled to 0"):
        place(router, "q", model="other")
    router.remove_endpoint("r0", 0.0)
    with pytest.raises(UnavailableError):
        place(router, "q2")


def test_a_router_that_knows_nothing_yet_lets_wait() -> None:
    """After its restart a gateway may speak before the supervisor does."""
    router = make()
    assert place(router, "q") is None
    add(router, "r0")
    assert poll(router) == {"q": "r0"}


def test_waits_for_a_replica_that_starts_or_restarts() -> None:
    router = make(queue_timeout_s=5.0)
    router.set_endpoint(Endpoint(replica_id="r0", model="m", address="/r0", kind="headrace"), 0.0)
    assert router.members()[0].state == "starting"
    assert place(router, "q") is None
    up(router, "r0")
    assert poll(router) == {"q": "r0"}
    router.down("r0", 1.0)
    assert router.members()[0].state == "down"
    assert place(router, "again", now=1.0) is None
    answers = poll(router, 6.5)
    assert isinstance(answers["again"], UnavailableError), "not full: there was none"


def test_waiters_are_told_when_the_last_endpoint_goes() -> None:
    router = make(1)
    fill(router, "q", 10)
    assert place(router, "late") is None
    router.remove_endpoint("r0", 0.0)
    answers = poll(router)
    assert isinstance(answers["late"], UnavailableError)
    assert poll(router) == {}


def test_draining_takes_nothing_new() -> None:
    router = make(2)
    draining = Endpoint(replica_id="r0", model="m", address="/r0", kind="headrace", draining=True)
    router.set_endpoint(draining, 0.0)
    assert router.members()[0].state == "draining"
    assert {place(router, f"q{i}") for i in range(4)} == {"r1"}


def test_roles_other_than_unified_are_not_placed_on() -> None:
    router = make(1)
    add(router, "p", role="prefill")
    assert {place(router, f"q{i}") for i in range(4)} == {"r0"}
    assert router.why("q0")[0].candidates[1].excluded == "role prefill"


def test_overflow_only_when_the_others_are_full() -> None:
    router = make(1)
    add(router, "hosted", TEXT, overflow=True)
    fill(router, "q", 10, only="r0")
    assert place(router, "late") == "hosted"


def test_servers_of_text_only_after_those_of_tokens_and_never_for_a_rescue() -> None:
    router = make(1)
    add(router, "text", TEXT)
    add(router, "hosted", TEXT, overflow=True)
    fill(router, "q", 10, only="r0")
    assert place(router, "late") == "text"
    assert place(router, "begun", attempt=1, exclude=["r0"]) is None
    assert place(router, "words", text_only=True) == "text"


def test_text_is_for_servers_that_take_text() -> None:
    router = make(1)
    with pytest.raises(UnavailableError, match="only be sent on as text"):
        place(router, "q", text_only=True)
    add(router, "v", VLLM)
    assert place(router, "q", text_only=True) == "v"


def test_excluded_replicas_are_avoided_while_another_is_up() -> None:
    router = make(2)
    assert place(router, "q", attempt=1, exclude=["r0"]) == "r1"
    release(router, "q")
    fill(router, "f", 20)
    release(router, next(f"f{i}" for i in range(20) if router.why(f"f{i}")[0].chosen == "r0"))
    assert place(router, "q", attempt=1, exclude=["r0"]) is None, "r1 is full, not gone"
    router.down("r1", 0.0)
    assert poll(router) == {"q": "r0"}, "better the one that failed it than none"


def test_one_that_avoids_a_replica_does_not_hold_up_the_others() -> None:
    router = make(2)
    fill(router, "f", 20)
    assert place(router, "picky", attempt=1, exclude=["r0"]) is None
    assert place(router, "any") is None
    release(router, next(f"f{i}" for i in range(20) if router.why(f"f{i}")[0].chosen == "r0"))
    assert poll(router) == {"any": "r0"}


# Faults


def test_faults_open_the_breaker_and_the_callers_mistakes_do_not() -> None:
    router = make(2)
    for i in range(3 * FAULTS):
        home = place(router, f"c{i}", attempt=1, exclude=["r1"])
        assert home == "r0"
        release(router, f"c{i}", "caller_fault" if i % 2 else "aborted")
    for i in range(FAULTS):
        assert place(router, f"f{i}", attempt=1, exclude=["r1"]) == "r0"
        release(router, f"f{i}", "replica_fault")
    status = router.status().replicas[0]
    assert (status.breaker, status.num_faults) == ("open", FAULTS)
    assert {place(router, f"q{i}") for i in range(4)} == {"r1"}
    assert router.why("q0")[0].candidates[1].excluded == "breaker open"


def test_half_open_lets_one_request_try() -> None:
    router = make(1)
    for i in range(FAULTS):
        place(router, f"f{i}")
        release(router, f"f{i}", "replica_fault")
    assert place(router, "w0") is None
    assert place(router, "w1") is None
    assert poll(router, 1.1) == {"w0": "r0"}
    assert poll(router, 1.2) == {}
    router.began("w0", 0.1, 0, 1.3)
    assert poll(router, 1.3) == {"w1": "r0"}


def test_a_lost_connection_is_believed_for_a_moment() -> None:
    router = make(1)
    place(router, "q")
    release(router, "q", "replica_gone")
    assert place(router, "q", attempt=1, exclude=["r0"]) is None, "it would be lost again"
    assert poll(router, 0.5 * SUSPECT_S) == {}
    assert poll(router, SUSPECT_S) == {"q": "r0"}


def test_a_restart_ends_suspicion_and_breaker() -> None:
    router = make(1)
    for i in range(8):
        place(router, f"q{i}")
    for i in range(8):
        release(router, f"q{i}", "replica_gone")
    router.down("r0", 0.1)
    up(router, "r0", instance="two", now=0.2)
    assert place(router, "next", now=0.2) == "r0"
    assert router.status().replicas[0].breaker == "closed"
    assert router.status().replicas[0].num_faults == 8


def test_another_instance_starts_empty_and_with_nothing_running() -> None:
    router = make(1)
    router.on_events("r0", 0, [stored(1, 2)], 0.0)
    fill(router, "q", 10)
    router.down("r0", 1.0)
    up(router, "r0", instance="two", now=2.0)
    status = router.status().replicas[0]
    assert (status.num_in_flight, status.num_indexed_blocks, status.num_index_resets) == (0, 0, 1)
    release(router, "q0", "replica_gone", now=2.0)
    fill(router, "n", 10)
    assert router.on_events("r0", 0, [stored(7)], 2.0) is None, "it counts from 0"


def test_the_same_instance_keeps_its_blocks() -> None:
    router = make(1)
    router.on_events("r0", 0, [stored(1, 2)], 0.0)
    place(router, "q", 1)
    router.down("r0", 1.0)
    up(router, "r0", instance="one", now=2.0)
    status = router.status().replicas[0]
    assert (status.num_in_flight, status.num_indexed_blocks) == (1, 2)
    assert router.on_events("r0", 2, [stored(5)], 2.0) == 1, "what happened meanwhile is missing"
    router.on_snapshot("r0", CacheSnapshot([stored(5)], 3), 2.0)
    assert router.status().replicas[0].num_indexed_blocks == 1


def test_news_of_replicas_that_are_not_known_is_ignored() -> None:
    router = make(1)
    up(router, "ghost")
    router.down("ghost", 0.0)
    router.on_stats("ghost", Stats(), 0.0)
    assert router.on_events("ghost", 5, [stored(1)], 0.0) is None
    router.on_snapshot("ghost", CacheSnapshot([], 0), 0.0)
    router.remove_endpoint("ghost", 0.0)
    router.began("ghost", 0.1, 0, 0.0)
    release(router, "ghost")
    assert [m.endpoint.replica_id for m in router.members()] == ["r0"]


def test_removed_while_it_serves() -> None:
    router = make(2)
    names = [f"q{i}" for i in range(4)]
    homes = {name: place(router, name) for name in names}
    router.remove_endpoint("r0", 0.0)
    router.check_integrity()
    for name in names:
        release(router, name, "replica_gone" if homes[name] == "r0" else "finished")
    add(router, "r0")
    assert all(status.num_in_flight == 0 for status in router.status().replicas)
    assert [router.why(name)[0].outcome for name in names if homes[name] == "r0"] == ["replica_gone"] * 2


# A router that was restarted


def lease(name: str, replica: str, *, began: bool, tokens: int = 1000) -> Lease:
    placed = Placement(request_id=name, replica_id=replica, num_cached_tokens=100)
    return Lease(route=route(name, tokens=tokens), placement=placed, began=began)


def test_leases_are_adopted_before_and_after_their_endpoint_is_known() -> None:
    router = make()
    router.adopt(lease("early", "r0", began=True), 0.0)
    router.adopt(lease("queued", "r0", began=False), 0.0)
    add(router, "r0", instance="as before")
    router.adopt(lease("later", "r0", began=False), 0.0)
    router.adopt(lease("later", "r0", began=False), 0.0)
    router.adopt(lease("elsewhere", "r9", began=False), 0.0)
    router.check_integrity()
    assert router.status().replicas[0].num_in_flight == 3
    assert place(router, "new", tokens=1000) == "r0"
    for name in ("early", "queued", "later", "elsewhere", "new"):
        router.began(name, 0.1, 0, 1.0)
        release(router, name, now=2.0)
    assert router.status().replicas[0].num_in_flight == 0
    add(router, "r9")
    assert router.status().replicas[1].num_in_flight == 0, "it had ended before its replica was known"


# What it tells


def test_why_tells_all_attempts_and_what_became_of_them() -> None:
    router = make(2)
    router.on_events("r0", 0, [stored(1, 2)], 0.0)
    assert place(router, "q", 1, 2, 3) == "r0"
    router.began("q", 0.25, 2 * BLOCK, 0.25)
    release(router, "q", "replica_gone", now=1.0)
    assert place(router, "q", 1, 2, 3, 4, attempt=1, exclude=["r0"], now=1.0) == "r1"
    first, second = router.why("caller-q")
    assert router.why("q") == [first, second]
    assert (first.chosen, first.outcome, first.ttft_s, first.num_cached_tokens) == (
        "r0",
        "replica_gone",
        0.25,
        32,
    )
    assert [c.num_cached_tokens for c in first.candidates] == [32, 0]
    assert first.candidates[0].score < first.candidates[1].score
    assert (second.chosen, second.outcome, second.attempt) == ("r1", None, 1)
    assert [c.excluded for c in second.candidates if c.replica_id == "r0"] == ["failed this request before"]
    assert router.status().replicas[0].num_rescued == 1
    assert router.why("unknown") == []


def test_models_and_members() -> None:
    router = make(1)
    add(router, "text", TEXT)
    (model,) = router.models()
    assert model.tokens, "one of its replicas takes tokens"
    members = {m.endpoint.replica_id: m for m in router.members()}
    assert members["r0"].capabilities == OURS
    assert (members["text"].state, members["text"].instance) == ("ready", "one")


@pytest.mark.parametrize(
    "policy", ["predicted_ttft", "round_robin", "random", "least_load", "power_of_two", "prefix_only"]
)
def test_every_policy_serves(policy: str) -> None:
    router = make(3, routing_policy=policy, seed=3)
    for i in range(30):
        assert place(router, f"q{i}", i % 4, tokens=200, now=float(i)) is not None
    assert router.status().policy == policy
    for i in range(30):
        router.began(f"q{i}", 0.1, 0, 40.0)
        release(router, f"q{i}", now=41.0)
    statuses = router.status().replicas
    assert sum(status.num_placed for status in statuses) == 30
    assert all(status.num_in_flight == 0 for status in statuses)
    assert all(status.predicted_ttft_s > 0 for status in statuses if status.num_placed)
