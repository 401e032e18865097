"""Scheduler, rule by rule."""

from __future__ import annotations

import pytest

from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.identity import block_identities
from headrace.core.messages import BlocksStored
from headrace.core.request import pack_tokens
from headrace.engine.scheduler import Schedule, Scheduler, SchedulerConfig
from headrace.engine.sequence import SequenceStatus
from headrace.kvcache.block_pool import BlockPool
from tests.engine.kv_oracle import EOS, make_request

ROOT = b"r" * 32


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 100,
    enable_prefix_caching: bool = True,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    return Scheduler(config, BlockPool(num_blocks, block_size), ROOT, [EOS])


def step(scheduler: Scheduler, token: int = 1) -> Schedule:
    """One step in which every sample gets ``token``."""
    schedule = scheduler.schedule()
    scheduler.update(schedule, [token for entry in schedule.entries if entry.samples])
    scheduler.check_integrity()
    return schedule


def finish(scheduler: Scheduler, token: int = 1) -> None:
    for _ in range(1000):
        if not scheduler.has_work:
            break
        step(scheduler, token)
    assert not scheduler.has_work
    assert scheduler.block_pool.num_free == scheduler.block_pool.num_blocks


def shape(schedule: Schedule) -> list[tuple[str, int, bool]]:
    return [(e.sequence.request_id, e.num_new_tokens, e.samples) for e in schedule.entries]


def distinct(count: int, start: int = 10) -> list[int]:
    return list(range(start, start + count))


# Chunks and budget


def test_prompt_is_computed_in_chunks_and_only_the_last_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    (sequence,) = scheduler.add(make_request("a", distinct(20)))
    assert shape(step(scheduler)) == [("a", 8, False)]
    assert shape(step(scheduler)) == [("a", 8, False)]
    assert sequence.num_output_tokens == 0
    assert shape(step(scheduler)) == [("a", 4, True)]
    assert list(sequence.output_token_ids) == [1]
    assert shape(step(scheduler)) == [("a", 1, True)]


def test_decodes_come_first_in_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("short", distinct(3)))
    scheduler.add(make_request("long", distinct(40, 100)))
    assert shape(step(scheduler)) == [("short", 3, True), ("long", 5, False)]
    schedule = step(scheduler)
    assert shape(schedule) == [("short", 1, True), ("long", 7, False)]
    assert (schedule.num_decodes, schedule.num_tokens) == (1, 8)


def test_decode_behind_a_long_prompt_is_not_starved() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("first", distinct(5, 50)))
    step(scheduler)
    (late,) = scheduler.add(make_request("late", distinct(40, 100), max_tokens=30))
    scheduler.add(make_request("last", distinct(2, 200)))
    for _ in range(6):  # 7 tokens of the late prompt in each
        schedule = step(scheduler)
        assert shape(schedule)[0] == ("first", 1, True)
        assert schedule.num_tokens <= 8
    assert late.num_sampled_tokens == 1


def test_rest_of_an_older_prompt_precedes_a_younger_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", distinct(10)))
    scheduler.add(make_request("b", distinct(10, 100)))
    assert shape(step(scheduler)) == [("a", 8, False)]
    assert shape(step(scheduler)) == [("a", 2, True), ("b", 6, False)]


def test_one_token_chunks_are_listed_with_the_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9)
    scheduler.add(make_request("a", distinct(8)))
    scheduler.add(make_request("b", distinct(8, 100)))
    schedule = step(scheduler)
    assert shape(schedule) == [("b", 1, False), ("a", 8, True)]
    assert schedule.num_decodes == 1


def test_waiting_line_is_never_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=4, max_model_len=40)
    scheduler.add(make_request("a", distinct(20), max_tokens=10))
    step(scheduler)
    scheduler.add(make_request("big", distinct(30, 100), max_tokens=2))
    scheduler.add(make_request("small", distinct(2, 200), max_tokens=2))
    for _ in range(5):
        assert shape(step(scheduler)) == [("a", 1, True)]
    assert scheduler.num_waiting == 2
    finish(scheduler)


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, distinct(3, ord(name)), max_tokens=3))
    assert [name for name, _, _ in shape(step(scheduler))] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    finish(scheduler)


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    for name in "abc":
        scheduler.add(make_request(name, distinct(3, ord(name)), max_tokens=10))
    for _ in range(6):
        assert step(scheduler).num_tokens <= 2
    assert scheduler.num_running == 2
    finish(scheduler)


def test_nothing_to_do_gives_an_empty_schedule() -> None:
    scheduler = make_scheduler()
    assert shape(step(scheduler)) == []
    assert not scheduler.has_work


def test_dropped_schedule_is_scheduled_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", distinct(12)))
    dropped = scheduler.schedule()
    assert shape(step(scheduler)) == shape(dropped)
    with pytest.raises(AssertionError, match="latest schedule"):
        scheduler.update(dropped, [])


# Prefix reuse


def test_next_turn_hits_prompt_and_output_of_the_last() -> None:
    scheduler = make_scheduler()
    (first,) = scheduler.add(make_request("a", distinct(10), max_tokens=7))
    finish(scheduler, token=5)
    (second,) = scheduler.add(make_request("b", [*first.tokens, 90, 91]))
    assert shape(step(scheduler)) == [("b", 3, True)]  # 16 of 19 tokens: the last sampled was never computed
    assert second.num_cached_tokens == 16
    counters = scheduler.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (29, 16)
    assert (counters.prompt_tokens, counters.computed_prompt_tokens) == (29, 13)


@pytest.mark.parametrize(("length", "computed"), [(8, 4), (9, 1), (11, 3)])
def test_full_hit_still_computes_the_last_token(length: int, computed: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", distinct(length), max_tokens=1))
    finish(scheduler)
    scheduler.add(make_request("b", distinct(length), max_tokens=1))
    assert shape(step(scheduler)) == [("b", computed, True)]


def test_running_sequences_share_blocks() -> None:
    scheduler = make_scheduler()
    (first,) = scheduler.add(make_request("a", distinct(9)))
    step(scheduler)
    (second,) = scheduler.add(make_request("b", distinct(9)))
    step(scheduler)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    finish(scheduler)


def test_same_prompt_computed_twice_at_once_is_sound() -> None:
    scheduler = make_scheduler()
    (first,) = scheduler.add(make_request("a", distinct(9)))
    (second,) = scheduler.add(make_request("b", distinct(9)))
    step(scheduler)
    assert not set(first.block_table) & set(second.block_table)
    scheduler.abort("a")
    scheduler.check_integrity()
    (third,) = scheduler.add(make_request("c", distinct(9)))
    step(scheduler)
    assert third.num_cached_tokens == 8
    finish(scheduler)


def test_prefix_caching_can_be_off() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_request(name, distinct(9), max_tokens=4))
        finish(scheduler)
    assert scheduler.counters.computed_prompt_tokens == 18
    assert scheduler.counters.prefix_cache_queries == 0
    assert scheduler.block_pool.take_events() == (0, [])


def test_prompt_logprobs_compute_every_position() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", distinct(9), max_tokens=1))
    finish(scheduler)
    (sequence,) = scheduler.add(make_request("b", distinct(9), prompt_logprobs=0))
    assert shape(step(scheduler)) == [("b", 9, True)]
    assert sequence.num_cached_tokens == 0
    assert scheduler.counters.prefix_cache_queries == 9


def test_identities_of_the_request_are_used_and_completed() -> None:
    scheduler = make_scheduler()
    prompt = distinct(12)
    chain = block_identities(ROOT, pack_tokens(prompt), 4)
    (whole,) = scheduler.add(make_request("a", prompt, block_ids=b"".join(chain)))
    (partial,) = scheduler.add(make_request("b", prompt, block_ids=chain[0]))
    (without,) = scheduler.add(make_request("c", prompt))
    assert whole.block_ids == partial.block_ids == without.block_ids == chain


@pytest.mark.parametrize("size", [33, 96])
def test_identities_that_cannot_belong_to_the_prompt_are_refused(size: int) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="block_ids must hold 32 bytes") as caught:
        scheduler.add(make_request("a", distinct(8), block_ids=bytes(size)))
    assert caught.value.param == "block_ids"
    assert not scheduler.has_work


def test_events_tell_each_chain_in_order() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    (sequence,) = scheduler.add(make_request("a", distinct(11), max_tokens=7))
    events = []
    for _ in range(9):
        step(scheduler)
        events += scheduler.block_pool.take_events()[1]
    chain = block_identities(ROOT, sequence.tokens, 4)
    assert sequence.finish_reason == "length" and len(chain) == 4
    assert events == [
        BlocksStored(block_ids=chain[:2], parent=ROOT),
        BlocksStored(block_ids=chain[2:3], parent=chain[1]),
        BlocksStored(block_ids=chain[3:], parent=chain[2]),
    ]


# Preemption


def test_last_arrived_is_preempted_and_recomputed() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    (first,) = scheduler.add(make_request("a", distinct(8), max_tokens=20))
    (second,) = scheduler.add(make_request("b", distinct(8, 100), max_tokens=12))
    schedule = next(s for s in (step(scheduler) for _ in range(20)) if s.preempted)
    assert schedule.preempted == [second]
    assert [e.sequence for e in schedule.entries] == [first], "the older one goes on in the same step"
    assert second.status is SequenceStatus.PREEMPTED
    assert (second.block_table, second.num_computed_tokens, second.num_preemptions) == ([], 0, 1)
    output = list(second.output_token_ids)
    finish(scheduler)
    assert list(second.output_token_ids)[: len(output)] == output
    assert (first.num_output_tokens, second.num_output_tokens) == (20, 12)
    assert scheduler.counters.num_preemptions >= 1


def test_sequence_preempts_itself_when_it_is_the_last() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=20, max_num_seqs=2)
    scheduler.add(make_request("a", distinct(7), max_tokens=8))
    (second,) = scheduler.add(make_request("b", distinct(4, 100), max_tokens=8))
    schedule = next(s for s in (step(scheduler) for _ in range(20)) if s.preempted)
    assert schedule.preempted == [second]
    assert [name for name, _, _ in shape(schedule)] == ["a"]
    finish(scheduler)


def test_preempted_sequence_is_first_in_line_and_hits_its_own_blocks() -> None:
    scheduler = make_scheduler(num_blocks=12, max_model_len=40)
    scheduler.add(make_request("a", distinct(16), max_tokens=20))
    (second,) = scheduler.add(make_request("b", distinct(16, 100), max_tokens=20))
    assert any(step(scheduler).preempted for _ in range(30))
    scheduler.add(make_request("c", distinct(3, 200)))
    scheduler.abort("a")
    schedule = step(scheduler)
    assert schedule.entries[0].sequence is second
    assert schedule.entries[0].num_new_tokens <= 5, "its full blocks were still cached"
    finish(scheduler)


def test_admission_leaves_room_for_the_next_tokens_of_who_runs() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    scheduler.add(make_request("a", distinct(11), max_tokens=12))
    step(scheduler)
    scheduler.add(make_request("b", distinct(12, 100), max_tokens=2))
    for _ in range(20):
        assert not step(scheduler).preempted
    assert not scheduler.has_work


def test_head_of_the_line_enters_when_enough_blocks_come_free() -> None:
    scheduler = make_scheduler(num_blocks=10, max_model_len=40)
    scheduler.add(make_request("a", distinct(8), max_tokens=20))
    scheduler.add(make_request("b", distinct(8, 100), max_tokens=20))
    step(scheduler)
    (third,) = scheduler.add(make_request("c", distinct(20, 200)))
    step(scheduler)
    assert third.status is SequenceStatus.WAITING
    scheduler.abort("b")
    assert ("c", 20, True) in shape(step(scheduler))
    finish(scheduler)


# Stop rules


@pytest.mark.parametrize(
    ("sampling", "sampled", "reason", "stop_token"),
    [
        ({"max_tokens": 3}, [1, 1, 1], "length", None),
        ({"max_tokens": 3}, [1, EOS], "stop", EOS),
        ({"max_tokens": 3}, [1, 1, EOS], "stop", EOS),
        ({"max_tokens": 3, "ignore_eos": True}, [EOS, EOS, EOS], "length", None),
        ({"stop_token_ids": [7, 8]}, [1, 8], "stop", 8),
        ({"stop_token_ids": [7], "ignore_eos": True}, [EOS, 7], "stop", 7),
        ({"max_tokens": 9, "min_tokens": 3}, [EOS, EOS, EOS], "stop", EOS),
        ({"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [7]}, [7, 7, 1, 7], "stop", 7),
        ({"max_tokens": None}, [1] * 15, "length", None),
        ({"max_tokens": 99}, [1] * 15, "length", None),
    ],
)
def test_stop_rules(
    sampling: dict[str, object], sampled: list[int], reason: str, stop_token: int | None
) -> None:
    scheduler = make_scheduler(max_model_len=20)
    (sequence,) = scheduler.add(make_request("a", distinct(5), **sampling))
    for token in sampled:
        assert sequence.finish_reason is None
        step(scheduler, token)
    assert (sequence.finish_reason, sequence.stop_token) == (reason, stop_token)
    assert list(sequence.output_token_ids) == sampled
    assert not scheduler.has_work


def test_update_returns_what_finished() -> None:
    scheduler = make_scheduler()
    (first,) = scheduler.add(make_request("a", distinct(3), max_tokens=1))
    (second,) = scheduler.add(make_request("b", distinct(3, 100), max_tokens=2))
    assert scheduler.update(scheduler.schedule(), [4, 5]) == [first]
    assert scheduler.update(scheduler.schedule(), [6]) == [second]
    assert (list(first.output_token_ids), list(second.output_token_ids)) == ([4], [5, 6])
    assert scheduler.counters.generation_tokens == 3


# Rescue


def test_rescued_output_counts_for_limits_and_positions() -> None:
    scheduler = make_scheduler()
    (sequence,) = scheduler.add(
        make_request("a", [*distinct(6), 1, 2, 3], num_output_tokens=3, max_tokens=5, sample_index=2)
    )
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.sample_index) == (6, 3, 2)
    step(scheduler, 4)
    assert sequence.num_output_tokens == 4
    step(scheduler, 5)
    assert (sequence.finish_reason, list(sequence.output_token_ids)) == ("length", [1, 2, 3, 4, 5])
    assert scheduler.counters.generation_tokens == 2


def test_rescued_output_counts_for_min_tokens() -> None:
    scheduler = make_scheduler()
    (sequence,) = scheduler.add(
        make_request("a", [*distinct(6), 1, 2], num_output_tokens=2, min_tokens=4, max_tokens=9)
    )
    step(scheduler, EOS)
    assert sequence.finish_reason is None
    step(scheduler, EOS)
    assert sequence.finish_reason == "stop"


def test_samples_rescued_one_by_one_share_their_request_id() -> None:
    scheduler = make_scheduler()
    for index in (1, 3):
        scheduler.add(make_request("a", [*distinct(6), index], num_output_tokens=1, sample_index=index))
    step(scheduler)
    assert scheduler.num_running == 2
    assert [s.sample_index for s in scheduler.abort("a", 3)] == [3]
    finish(scheduler)


@pytest.mark.parametrize(
    ("num_output_tokens", "sampling"), [(9, {}), (10, {}), (-1, {}), (2, {"n": 2}), (4, {"max_tokens": 4})]
)
def test_impossible_rescue_is_refused(num_output_tokens: int, sampling: dict[str, object]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError):
        scheduler.add(make_request("a", distinct(9), num_output_tokens=num_output_tokens, **sampling))
    assert not scheduler.has_work


# Refusals


def test_prompt_longer_than_the_context_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=20)
    with pytest.raises(ContextLengthError, match="has 20 tokens; the context holds 20") as caught:
        scheduler.add(make_request("a", distinct(20)))
    assert caught.value.hint is not None and "--max-model-len" in caught.value.hint
    scheduler.add(make_request("a", distinct(19)))
    finish(scheduler)


def test_request_that_could_outgrow_the_pool_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=100)
    with pytest.raises(ContextLengthError, match="may reach 18 tokens; the KV cache holds 16"):
        scheduler.add(make_request("a", distinct(8), max_tokens=10))
    scheduler.add(make_request("a", distinct(8), max_tokens=9))
    finish(scheduler)


def test_empty_prompt_and_known_id_are_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="at least one token"):
        scheduler.add(make_request("a", []))
    scheduler.add(make_request("a", distinct(3), max_tokens=1))
    with pytest.raises(InvalidRequestError, match="already running"):
        scheduler.add(make_request("a", distinct(3)))
    finish(scheduler)
    scheduler.add(make_request("a", distinct(3), max_tokens=1))
    finish(scheduler)


# Several samples


def test_samples_wait_for_the_first_ones_prompt_and_hit_its_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    samples = scheduler.add(make_request("a", distinct(13), n=3, max_tokens=4))
    scheduler.add(make_request("b", distinct(5, 100)))
    assert [s.status for s in samples[1:]] == [SequenceStatus.HELD] * 2
    assert scheduler.num_waiting == 4
    step(scheduler)
    assert [s.status for s in samples[1:]] == [SequenceStatus.HELD] * 2
    assert shape(step(scheduler)) == [("a", 5, True), ("b", 3, False)]
    assert [s.status for s in samples[1:]] == [SequenceStatus.WAITING] * 2
    schedule = step(scheduler)
    assert shape(schedule) == [("a", 1, True), ("a", 1, True), ("a", 1, True), ("b", 2, True)]
    assert [s.num_cached_tokens for s in samples] == [0, 12, 12]
    assert len({s.block_table[3] for s in samples}) == 3
    finish(scheduler)
    assert [s.num_output_tokens for s in samples] == [4, 4, 4]


@pytest.mark.parametrize("when", ["waiting", "mid-prompt"])
def test_next_sample_leads_when_the_first_is_aborted(when: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    samples = scheduler.add(make_request("a", distinct(13), n=3, max_tokens=2))
    if when == "mid-prompt":
        step(scheduler)
    assert scheduler.abort("a", 0) == [samples[0]]
    scheduler.check_integrity()
    assert [s.status for s in samples[1:]] == [SequenceStatus.WAITING, SequenceStatus.HELD]
    finish(scheduler)
    assert [s.finish_reason for s in samples] == ["abort", "length", "length"]
    assert samples[2].num_cached_tokens == 12


def test_samples_without_reuse_do_not_wait() -> None:
    for sampling, caching in (({"prompt_logprobs": 1}, True), ({}, False)):
        scheduler = make_scheduler(enable_prefix_caching=caching)
        scheduler.add(make_request("a", distinct(9), n=3, max_tokens=2, **sampling))
        assert shape(step(scheduler)) == [("a", 9, True)] * 3
        finish(scheduler)


# Abort


def test_abort_frees_blocks_at_once_in_every_state() -> None:
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=8, max_model_len=48, max_num_seqs=2)
    free = scheduler.block_pool.num_blocks
    (running,) = scheduler.add(make_request("running", distinct(4), max_tokens=30))
    step(scheduler)
    (prefill,) = scheduler.add(make_request("prefill", distinct(20, 100)))
    samples = scheduler.add(make_request("samples", distinct(8, 200), n=3))
    step(scheduler)
    assert running.status is prefill.status is SequenceStatus.RUNNING and prefill.num_computed_tokens == 7
    assert scheduler.abort("samples", 1) == [samples[1]]  # held
    assert scheduler.abort("samples") == [samples[0], samples[2]]  # waiting, held
    assert scheduler.abort("prefill") == [prefill]
    scheduler.check_integrity()
    assert scheduler.block_pool.num_free == free - len(running.block_table)
    assert scheduler.abort("running") == [running]
    assert scheduler.block_pool.num_free == free
    assert scheduler.abort("running") == scheduler.abort("never seen") == []
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_abort_of_a_preempted_sequence() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    scheduler.add(make_request("a", distinct(8), max_tokens=20))
    (second,) = scheduler.add(make_request("b", distinct(8, 100), max_tokens=20))
    assert any(step(scheduler).preempted for _ in range(20))
    assert second.status is SequenceStatus.PREEMPTED
    assert scheduler.abort("b") == [second]
    scheduler.check_integrity()
    finish(scheduler)


def test_abort_between_schedule_and_update_ignores_the_entry() -> None:
    scheduler = make_scheduler()
    (first,) = scheduler.add(make_request("a", distinct(9)))
    (second,) = scheduler.add(make_request("b", distinct(3, 100)))
    schedule = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.update(schedule, [4, 5]) == []
    scheduler.check_integrity()
    assert (list(first.output_token_ids), list(second.output_token_ids)) == ([], [5])
    assert scheduler.block_pool.lookup(first.block_ids) == [], "what was not computed has no identity"
    finish(scheduler)


def test_integrity_check_finds_a_lost_sequence() -> None:
    scheduler = make_scheduler()
    (sequence,) = scheduler.add(make_request("a", distinct(9)))
    step(scheduler)
    sequence.block_table.pop()
    with pytest.raises(AssertionError):
        scheduler.check_integrity()


def test_long_prompt_gets_one_run_of_blocks_even_across_turns() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=16)
    scheduler.add(make_request("stream", distinct(3, 200), max_tokens=40))
    (first,) = scheduler.add(make_request("a", distinct(50), max_tokens=1))
    table: list[int] = []
    for _ in range(5):
        step(scheduler)
        table = list(first.block_table) or table
    assert first.finish_reason == "length"
    assert table == list(range(table[0], table[0] + len(table)))
    (second,) = scheduler.add(make_request("b", distinct(70), max_tokens=1))
    step(scheduler)
    assert second.num_cached_tokens == 48
    assert second.block_table[: len(table)] == table
