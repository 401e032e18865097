"""Which prompts are split between two replicas, and what is told of it."""

from __future__ import annotations

import random

import pytest

from headrace.core.messages import Moves, Stats, Timing
from headrace.core.routing import Capabilities, Lease, Placement
from headrace.router.pairs import num_streams
from tests.router.pairs import (
    LONG,
    NUM_BLOCKS,
    RATE,
    SGLANG,
    began,
    delivered,
    kv,
    place,
    release,
    split,
    status_of,
    streams,
    words,
)
from tests.router.routing import BLOCK, add, make, route, stats, stored, up


def test_with_streams_running_a_long_prompt_is_computed_elsewhere():
    router = split()
    streams(router, 4)
    placement = place(router, "r", *LONG)
    assert placement.replica_id == "d0"
    assert (placement.prefill_replica, placement.prefill_address) == ("p0", "unix:/p0")
    (decision,) = router.why("r")
    assert decision.prefill_replica == "p0"
    assert decision.split.startswith("split: 1,600 tokens computed on p0, saves ")
    seen = next(one for one in decision.candidates if one.replica_id == "d0")
    assert seen.num_fetched_tokens == NUM_BLOCKS * BLOCK and 0.8 < seen.fill_s < 1.0
    assert seen.fill_s < placement.ttft_s < seen.fill_s + 0.1
    assert next(one for one in decision.candidates if one.replica_id == "p0").excluded == "role prefill"


def test_without_streams_the_decode_replica_computes_its_prompt_itself():
    router = split()
    placement = place(router, "r", *LONG)
    assert (placement.replica_id, placement.prefill_replica, placement.prefill_address) == ("d0", "", "")
    assert words(router, "r").startswith("not split: p0, ready in 0.81 s, costs ")
    assert status_of(router, "d0").num_unsplit == 1 and status_of(router, "d0").num_split == 0


def test_shared_memory_ends_at_the_machine():
    router = make()
    add(router, "p0", role="prefill", kv=kv("prefill", "p0", host="one"))
    add(router, "d0", role="decode", kv=kv("decode", "d0", host="two"))
    streams(router, 4)
    assert not place(router, "r", *LONG).prefill_replica
    assert words(router, "r") == (
        "not split: p0: on another host, and gives blocks over shared memory (kv_connector: tcp)"
    )
    up(router, "p0", kv=kv("prefill", "p0", host="one", address="tcp://10.0.0.1:9"))
    assert place(router, "next", *(n + 1000 for n in LONG)).prefill_address == "tcp://10.0.0.1:9"
    up(router, "p0", kv=kv("prefill", "p0", host="two"))
    assert place(router, "last", *(n + 2000 for n in LONG)).prefill_address == "unix:/p0"


def test_a_queue_of_prompts_there_is_reason_enough():
    router = split()
    assert not place(router, "first", *LONG).prefill_replica
    assert place(router, "second", *(n + 1000 for n in LONG)).prefill_replica == "p0"


def test_there_is_a_length_below_which_moving_does_not_pay():
    def is_split(num_blocks: int) -> bool:
        router = split()
        streams(router, 1)
        return bool(place(router, "r", *range(1, num_blocks + 1)).prefill_replica)

    answers = [is_split(n) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert answers[0] is False and answers[-1] is True
    assert answers == sorted(answers)


def test_what_is_cached_is_not_split():
    router = split()
    streams(router, 4)
    router.on_events("d0", 0, [stored(*LONG)], 0.0)
    placement = place(router, "r", *LONG)
    assert placement.num_cached_tokens == NUM_BLOCKS * BLOCK and not placement.prefill_replica
    assert words(router, "r") == "not split: nothing is left to fetch"


def test_of_several_the_one_that_has_the_prefix_computes():
    router = split(prefill=3)
    streams(router, 4)
    router.on_events("p1", 0, [stored(*LONG[:80])], 0.0)
    assert place(router, "r", *LONG).prefill_replica == "p1"


def test_a_giver_is_credited_at_once_so_that_prompts_spread():
    router = split(prefill=2)
    streams(router, 4)
    first = place(router, "a", *LONG)
    second = place(router, "b", *(n + 1000 for n in LONG))
    assert {first.prefill_replica, second.prefill_replica} == {"p0", "p1"}
    assert status_of(router, "p0").num_in_flight == status_of(router, "p1").num_in_flight == 1
    began(router, "a", delivered())
    assert status_of(router, first.prefill_replica).num_in_flight == 0
    release(router, "b", "aborted")
    assert status_of(router, second.prefill_replica).num_in_flight == 0


def test_a_giver_whose_queue_is_too_long_is_not_used():
    router = split()
    streams(router, 1)
    chosen = [bool(place(router, f"r{i}", *(n + 1000 * i for n in LONG)).prefill_replica) for i in range(7)]
    assert chosen[0] and not all(chosen)
    assert any("p0, ready in" in words(router, f"r{i}") for i in range(7))


def test_blocks_that_are_slow_to_move_are_computed_where_they_are_needed():
    router = split()
    streams(router, 1)
    assert place(router, "fast", *LONG).prefill_replica
    release(router, "fast")
    told = Moves(fetched_bytes=10_000_000, fetch_s=20.0, fetch_overlap_s=10.0)
    router.on_stats("d0", Stats(num_blocks=1000, num_free_blocks=1000, moves=told), 0.0)
    assert not place(router, "slow", *LONG).prefill_replica
    assert status_of(router, "d0").moves == told


def test_another_process_counts_its_moves_from_zero():
    router = split()
    told = Moves(fetched_bytes=1_000_000_000, fetch_s=0.1)
    router.on_stats("d0", Stats(num_blocks=1000, num_free_blocks=1000, moves=told), 0.0)
    up(router, "d0", instance="two", kv=kv("decode", "d0"))
    slow = Moves(fetched_bytes=900_000_000, fetch_s=9000.0)
    router.on_stats("d0", Stats(num_blocks=1000, num_free_blocks=1000, moves=slow), 0.0)
    streams(router, 1)
    assert not place(router, "r", *LONG).prefill_replica


def test_what_overlaps_the_computing_costs_nothing():
    router = split()
    streams(router, 1)
    told = Moves(fetched_bytes=10_000_000, fetch_s=10.001, fetch_overlap_s=10.0)
    router.on_stats("d0", Stats(num_blocks=1000, num_free_blocks=1000, moves=told), 0.0)
    assert place(router, "r", *LONG).prefill_replica == "p0"


def test_a_replica_that_keeps_other_blocks_gives_none():
    router = split(prefill=0)
    add(router, "p0", role="prefill", kv=kv("prefill", "p0", format="fp32"))
    streams(router, 4)
    assert not place(router, "r", *LONG).prefill_replica
    assert words(router, "r") == "not split: p0: keeps its blocks in another format"


@pytest.mark.parametrize(
    ("what", "reason"),
    [("down", "p0: down"), ("draining", "p0: draining"), ("failed", "p0: failed this request before")],
)
def test_a_giver_that_cannot_take_it_is_passed_over_with_its_reason(what, reason):
    router = split()
    streams(router, 4)
    fields = {}
    if what == "down":
        router.down("p0", 0.0, "killed")
    elif what == "draining":
        draining = add(router, "p0", role="prefill", draining=True, kv=kv("prefill", "p0"))
        assert draining is None
    else:
        fields = {"attempt": 1, "exclude": ["p0"]}
    assert not place(router, "r", *LONG, **fields).prefill_replica
    assert words(router, "r") == f"not split: {reason}"


def test_a_prompt_that_must_be_computed_whole_is_not_split():
    router = split()
    streams(router, 4)
    assert not place(router, "r", *LONG, whole=True).prefill_replica
    assert words(router, "r") == "not split: all of the prompt must be computed there"


def test_prefill_replicas_answer_only_when_there_is_nothing_else():
    router = split(decode=2)
    names = {place(router, f"r{i}", 5000 + i).replica_id for i in range(16)}
    assert names == {"d0", "d1"}
    router.down("d0", 0.0)
    router.down("d1", 0.0)
    assert place(router, "alone", *LONG).replica_id == "p0"
    up(router, "d0", kv=kv("decode", "d0"))
    assert place(router, "back", *LONG).replica_id == "d0"


def test_a_full_decode_side_is_waited_for_although_a_prefill_replica_is_idle():
    router = make()
    add(router, "p0", role="prefill", kv=kv("prefill", "p0"))
    add(router, "d0", role="decode", max_in_flight=1, kv=kv("decode", "d0"))
    place(router, "a", 1)
    assert router.place(route("b", 2), 0.0, 0.0) is None
    release(router, "a")
    ((name, answer),) = router.poll(0.0, 0.0)
    assert name == "b" and isinstance(answer, Placement) and answer.replica_id == "d0"


def test_a_unified_replica_takes_from_a_prefill_replica_and_gives_to_decode_alone():
    router = make()
    add(router, "u0", kv=kv("unified", "u0"))
    add(router, "p0", role="prefill", kv=kv("prefill", "p0"))
    streams(router, 4)
    assert place(router, "r", *LONG).prefill_replica == "p0"
    router = make()
    add(router, "u0", kv=kv("unified", "u0"), overflow=True)
    add(router, "d0", role="decode", kv=kv("decode", "d0"))
    streams(router, 4)
    placement = place(router, "r", *LONG)
    assert (placement.replica_id, placement.prefill_replica) == ("d0", "u0")
    router = make()
    add(router, "u0", kv=kv("unified", "u0"))
    add(router, "u1", kv=kv("unified", "u1"))
    streams(router, 8)
    assert not place(router, "r", *LONG).prefill_replica and words(router, "r") == ""


def test_the_role_that_a_replica_tells_is_the_one_that_counts():
    router = make()
    add(router, "a", kv=kv("prefill", "a"))
    add(router, "b", kv=kv("decode", "b"))
    streams(router, 4)
    placement = place(router, "r", *LONG)
    assert (placement.replica_id, placement.prefill_replica) == ("b", "a")


def test_the_givers_rate_is_learned_from_what_it_delivers():
    router = split()
    streams(router, 4)
    now = 0.0
    for i in range(10):  # 1,600 tokens in 0.4 s: twice as fast as was assumed; then the other side's part
        place(router, f"r{i}", *(n + 1000 * i for n in LONG), now=now)
        now += 0.41 + 0.3
        timing = Timing(0.0, 0.3, 8, fill_s=0.4, num_fetched_tokens=1600)
        began(router, f"r{i}", timing, now=now)
        release(router, f"r{i}", now=now)
    assert status_of(router, "p0").prefill_rate == pytest.approx(4000, rel=0.1)


def test_prompts_that_others_computed_say_nothing_of_the_replicas_own_rate():
    router = make()
    add(router, "p0", role="prefill", kv=kv("prefill", "p0"), hardware="fast")
    add(router, "d0", role="decode", kv=kv("decode", "d0"), hardware="slow")
    streams(router, 4)
    before = status_of(router, "d0").prefill_rate
    place(router, "r", *LONG)
    began(router, "r", delivered(), now=60.0)
    assert status_of(router, "d0").prefill_rate == before


def test_nor_do_prompts_whose_way_is_not_told():
    router = make()
    add(router, "p0", SGLANG, role="prefill", hardware="fast")
    add(router, "d0", SGLANG, role="decode", hardware="slow")
    before = status_of(router, "d0").prefill_rate
    assert place(router, "r", *LONG).prefill_replica == "p0"
    began(router, "r", None, now=60.0)
    assert status_of(router, "d0").prefill_rate == before


def test_what_will_be_computed_there_is_not_computed_elsewhere():
    router = split(prefill=2)
    streams(router, 4)
    first = place(router, "a", *LONG)
    now = 0.75  # it is nearly done, and the other one is idle
    assert place(router, "b", *LONG, now=now).prefill_replica == first.prefill_replica
    assert place(router, "c", *(n + 1000 for n in LONG), now=now).prefill_replica != first.prefill_replica


def test_prompts_that_wait_at_a_giver_are_no_streams_yet():
    router = split()
    streams(router, 2)
    replica = router._registry.get("d0")
    assert num_streams(replica) == 2
    assert place(router, "long", *LONG).prefill_replica
    assert num_streams(replica) == 2
    assert not place(router, "short", 1, num_samples=3).prefill_replica
    assert num_streams(replica) == 5
    began(router, "long", delivered())
    assert num_streams(replica) == 6


def test_nobody_computes_for_itself():
    router = split(decode=0)
    streams(router, 4)
    placement = place(router, "r", *LONG)
    assert (placement.replica_id, placement.prefill_replica) == ("p0", "")
    assert words(router, "r") == ""


def test_what_became_of_it_is_told():
    router = split()
    streams(router, 4)
    place(router, "r", *LONG)
    began(router, "r", Timing(0.0, 0.01, 8, fill_s=0.9, num_fetched_tokens=1280, num_disk_tokens=320))
    (decision,) = router.why("r")
    assert (decision.num_fetched_tokens, decision.num_disk_tokens, decision.fill_s) == (1280, 320, 0.9)
    assert status_of(router, "d0").num_split == 1


def test_a_router_that_starts_anew_learns_of_both_halves():
    router = split()
    asked = route("r", *LONG)
    told = Placement(request_id="r", replica_id="d0", prefill_replica="p0", prefill_address="unix:/p0")
    router.adopt(Lease(route=asked, placement=told, began=False), 0.0)
    router.check_integrity()
    assert status_of(router, "p0").num_in_flight == status_of(router, "d0").num_in_flight == 1
    began(router, "r", delivered())
    assert status_of(router, "p0").num_in_flight == 0
    began_already = Lease(route=route("s", *LONG), placement=told, began=True)
    router.adopt(began_already, 0.0)
    router.check_integrity()
    assert status_of(router, "p0").num_in_flight == 0


def test_what_was_half_computed_when_the_router_started_says_nothing_of_the_rate():
    router = split()
    told = Placement(request_id="r", replica_id="d0", prefill_replica="p0", prefill_address="unix:/p0")
    for i in range(3):  # their prompts were all but computed before
        asked = route(f"r{i}", *(n + 1000 * i for n in LONG))
        router.adopt(Lease(route=asked, placement=told, began=False), float(i))
        began(router, f"r{i}", Timing(0.0, 0.001, 8, fill_s=0.9, num_fetched_tokens=1600), now=i + 0.003)
    streams(router, 4, now=10.0)
    place(router, "new", *(n + 9000 for n in LONG), now=10.0)
    seen = next(one for one in router.why("new")[-1].candidates if one.replica_id == "d0")
    assert seen.fill_s > 0.5 * len(LONG) * BLOCK / RATE


def test_a_decode_server_that_does_nothing_alone_waits_for_a_prefill_server():
    router = make()
    add(router, "d0", SGLANG, role="decode")
    assert router.place(route("r", *LONG), 0.0, 0.0) is None
    add(router, "p0", SGLANG, role="prefill", address="http://p0", bootstrap_port=8998)
    ((_, answer),) = router.poll(0.0, 0.0)
    assert isinstance(answer, Placement)
    assert (answer.replica_id, answer.prefill_replica) == ("d0", "p0")
    assert answer.prefill_address == "http://p0"
    # short, whole and failed before: there is no other way
    asked = {"whole": True, "attempt": 1, "exclude": ["p0"]}
    assert place(router, "short", **asked).prefill_replica == "p0"
    router.down("d0", 0.0)
    assert router.place(route("never", *LONG), 0.0, 0.0) is None, "a prefill server answers nobody"


def test_servers_of_another_kind_exchange_nothing():
    router = split(prefill=0)
    vllm = Capabilities(kind="vllm", remote_model="x", tokens=True, abort=True, load=True)
    add(router, "p0", vllm, role="prefill", address="http://p0")
    streams(router, 4)
    assert not place(router, "ours", *LONG).prefill_replica
    router = make()
    add(router, "d0", vllm, role="decode")
    add(router, "p0", vllm, role="prefill", address="http://p0")
    streams(router, 4)
    assert place(router, "theirs", *LONG).prefill_address == "http://p0"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_sums_are_right(seed):
    """Random placements, answers, deaths and restarts of either side."""
    rng = random.Random(seed)
    router = split(prefill=2, decode=2)
    names = ["p0", "p1", "d0", "d1"]
    placed: dict[str, Placement] = {}
    waiting: set[str] = set()
    now = 0.0
    for step in range(300):
        now += rng.random() * 0.1
        what = rng.random()
        if what < 0.45:
            start = rng.randrange(5) * 1000
            numbers = range(start, start + rng.randrange(1, 120))
            name = f"r{step}"
            answer = router.place(route(name, *numbers, num_samples=rng.choice([1, 1, 2])), now, now)
            if answer is None:
                waiting.add(name)
            else:
                placed[name] = answer
        elif what < 0.65 and placed:
            name = rng.choice(sorted(placed))
            fetched = rng.choice([0, 320, 1600])
            router.began(name, 0.1, 0, now, Timing(0.0, 0.01, 8, rng.choice([0.0, 0.2]), fetched))
        elif what < 0.85 and placed:
            name = rng.choice(sorted(placed))
            del placed[name]
            outcome = rng.choice(["finished", "aborted", "replica_fault", "replica_gone"])
            router.release(name, outcome, 3, 0.1, now, rng.choice([None, "replica_gone"]))
        elif what < 0.9:
            router.down(rng.choice(names), now)
        elif what < 0.97:
            name = rng.choice(names)
            role = "prefill" if name.startswith("p") else "decode"
            up(router, name, instance=rng.choice(["one", "two"]), kv=kv(role, name), now=now)
        else:
            name = rng.choice(names)
            role = "prefill" if name.startswith("p") else "decode"
            router.remove_endpoint(name, now)
            add(router, name, now=now, role=role, kv=kv(role, name))
        for name, answer in router.poll(now, now):
            waiting.discard(name)
            if isinstance(answer, Placement):
                placed[name] = answer
        router.check_integrity()
    for name in [*placed, *waiting]:
        router.release(name, "aborted", 0, 0.0, now)
    router.check_integrity()
    assert all(s.num_in_flight == 0 for s in router.status().replicas)


def test_free_blocks_on_the_decode_side_are_still_needed():
    """A decode replica without room is predicted to be late, split or not."""
    router = split(decode=2)
    streams(router, 4)
    router.on_stats("d0", stats(blocks=110, free=10), 0.0)
    assert place(router, "r", *LONG).replica_id == "d1"
