"""Which sequences compute what in a step: budget, order, prefix reuse, preemption."""

from __future__ import annotations

import pytest

from headrace.core.errors import InvalidRequestError
from headrace.core.identity import block_identities
from headrace.core.messages import BlocksStored
from headrace.core.request import pack_tokens
from headrace.engine.sequence import SequenceStatus
from tests.engine.kv_oracle import make_request
from tests.engine.scheduling import ROOT, distinct, finish, make_scheduler, shape, step

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


# The whole


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


# What waits


def test_prompt_tokens_still_to_compute_are_counted_less_what_the_cache_has() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2)
    scheduler.add(make_request("a", distinct(20), max_tokens=3))
    assert scheduler.num_queued_tokens == 20
    step(scheduler)
    assert scheduler.num_queued_tokens == 12
    step(scheduler)
    step(scheduler)
    assert scheduler.num_queued_tokens == 0
    scheduler.add(make_request("b", [*distinct(20), 7, 7]))
    assert scheduler.num_queued_tokens == 2, "five blocks are cached"
    scheduler.add(make_request("c", distinct(9, start=50), n=3))
    assert scheduler.num_queued_tokens == 11, "samples share their prompt"
    scheduler.abort("c")
    assert scheduler.num_queued_tokens == 2
    finish(scheduler)
    assert scheduler.num_queued_tokens == 0


def test_a_step_says_whom_it_begins() -> None:
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=8)
    scheduler.add(make_request("a", distinct(10), max_tokens=15))
    scheduler.add(make_request("b", distinct(10, start=50), max_tokens=15))
    begun = []
    preempted = 0
    while scheduler.has_work:
        schedule = step(scheduler)
        begun += [sequence.request_id for sequence in schedule.admitted]
        preempted += len(schedule.preempted)
    assert begun == ["a", "b"] and preempted, "once each, however often one is preempted"
