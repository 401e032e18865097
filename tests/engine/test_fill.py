"""Sequences whose prefix comes from elsewhere: late, in part, wrong or never; their tokens stay the same.

Keys and tokens are those of ``kv_oracle``, which fails at any key that is not the sequence's own.
"""

from __future__ import annotations

import pytest

from headrace.core.request import Request
from headrace.engine import fill
from headrace.engine.sequence import Sequence, SequenceStatus
from tests.engine.kv_oracle import expected_output, make_request
from tests.engine.scheduling import distinct, make_scheduler
from tests.engine.sources import FillingRig

PROMPT = distinct(22)  # of 4 a block: five full ones and a tail


def make_rig(**config: int) -> FillingRig:
    return FillingRig(make_scheduler(**config))


def remote_request(request_id: str, prompt: list[int], **sampling: object) -> Request:
    request = make_request(request_id, prompt, **sampling)
    return Request(
        request_id=request_id, prompt=request.prompt, sampling=request.sampling, prefill_from="unix:/peer"
    )


def check_output(rig: FillingRig, finished: list[Sequence]) -> None:
    for sequence in finished:
        expected, _, _ = expected_output(
            sequence.request, sequence.sample_index, vocab_size=40, max_model_len=100
        )
        assert list(sequence.output_token_ids) == expected


def keep_on_disk(rig: FillingRig, prompt: list[int]) -> None:
    """Computes a prompt, writes its blocks to disk and empties memory."""
    rig.scheduler.add(make_request("writer", prompt, max_tokens=1))
    rig.finish()
    rig.write_behind.advance(busy=False)
    rig.scheduler.reset_prefix_cache()


def test_what_memory_lacks_comes_from_a_prefill_replica() -> None:
    rig = make_rig()
    (sequence,) = rig.scheduler.add(remote_request("a", PROMPT))
    assert sequence.status is SequenceStatus.FILLING and rig.scheduler.num_in_line == 0
    (job,) = rig.remote.opened
    assert (job.first, len(job.block_ids), job.address) == (0, 5, "unix:/peer")
    for count in range(1, 6):
        rig.remote.deliver()
        schedule, _ = rig.step()
        assert not schedule.entries and len(sequence.held_blocks) == count
    rig.remote.end("")
    schedule, _ = rig.step()
    assert [(e.sequence, e.num_new_tokens) for e in schedule.entries] == [(sequence, 2)]
    check_output(rig, rig.finish())
    assert (sequence.num_hit_tokens, sequence.num_cached_tokens, sequence.num_fetched_blocks) == (20, 0, 5)
    assert rig.scheduler.counters.computed_prompt_tokens == 2
    assert rig.filler.counters.fetched_blocks == 5 and rig.remote.num_consumed == 5


def test_memory_first_then_disk_then_the_replica() -> None:
    rig = make_rig()
    keep_on_disk(rig, PROMPT[:13])
    rig.scheduler.add(make_request("m", PROMPT[:5], max_tokens=1))
    rig.disk.end("", 0)
    rig.disk.jobs.clear()
    rig.finish()
    (sequence,) = rig.scheduler.add(remote_request("a", PROMPT))
    (job,) = [job for job in rig.disk.opened if job.job_id.startswith("a")]
    assert (job.first, len(job.block_ids), rig.remote.opened) == (1, 3, [])
    rig.disk.deliver(3)
    rig.step()
    (job,) = rig.remote.opened
    assert (job.first, len(job.block_ids)) == (3, 5)
    rig.remote.deliver(3)
    schedule, _ = rig.step()
    assert schedule.num_tokens == 2
    assert (sequence.first_filled_block, sequence.num_disk_blocks, sequence.num_fetched_blocks) == (1, 2, 2)
    assert sequence.num_cached_tokens == 12
    check_output(rig, rig.finish())


@pytest.mark.parametrize("how", ["identity", "length", "number"])
def test_a_wrong_block_ends_the_fill_and_the_rest_is_computed(how: str) -> None:
    rig = make_rig()
    (sequence,) = rig.scheduler.add(remote_request("a", PROMPT))
    rig.remote.deliver(2)
    rig.remote.deliver_wrong(how)
    schedule, _ = rig.step()
    assert not rig.remote.jobs, "the source was not told to stop"
    assert schedule.num_tokens == 22 - 8
    assert rig.filler.counters.damaged_blocks == 1 and rig.filler.counters.failed_fetches == 1
    assert rig.pool.lookup([b"x" * 32]) == [], "a foreign block was taken in"
    check_output(rig, rig.finish())
    assert len(rig.remote.opened) == 1 and sequence.num_fetched_blocks == 2


def test_a_source_that_ends_early_or_says_nothing_costs_only_time() -> None:
    rig = make_rig()
    rig.scheduler.add(remote_request("early", PROMPT))
    rig.scheduler.add(remote_request("never", [9, *PROMPT]))
    rig.remote.deliver(3)
    rig.remote.end("the replica is gone")
    rig.step()
    assert rig.scheduler.num_filling == 1 and rig.filler.wait_s() > 1.0
    rig.now += rig.filler.wait_s() or 0.0
    schedule, _ = rig.step()
    assert rig.scheduler.num_filling == 0
    assert [e.sequence.request_id for e in schedule.entries] == ["early", "never"]
    assert schedule.entries[1].num_new_tokens == 23
    check_output(rig, rig.finish())
    assert rig.filler.counters.failed_fetches == 2


def test_blocks_that_keep_coming_extend_the_wait_but_not_for_ever() -> None:
    rig = make_rig(num_blocks=200, max_model_len=400)
    prompt = [(7 * i) % 40 for i in range(300)]
    rig.scheduler.add(remote_request("a", prompt))
    waited = 0
    while rig.scheduler.num_filling:
        rig.remote.deliver()
        rig.step()
        rig.now += 4.0
        waited += 1
    longest = 3 * (fill.STALL_S + 2 * fill.UNKNOWN_S)
    assert longest < 4.0 * waited < longest + 9.0
    assert rig.scheduler.counters.computed_prompt_tokens <= 300 - 4 * (waited - 1)


def test_a_filling_sequence_keeps_its_place_by_arrival() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.scheduler.add(make_request("first", [1, 2, 3], max_tokens=3))
    rig.scheduler.add(remote_request("filled", PROMPT))
    rig.scheduler.add(make_request("later", [4, 5, 6], max_tokens=3))
    rig.step()
    rig.remote.deliver(6)
    order = [sequence.request_id for sequence in rig.finish()]
    assert order == ["first", "filled", "later"]


def test_others_pass_while_blocks_are_on_their_way() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.scheduler.add(remote_request("filled", PROMPT))
    rig.scheduler.add(make_request("later", [4, 5, 6], max_tokens=2))
    schedule, _ = rig.step()
    assert [e.sequence.request_id for e in schedule.entries] == ["later"]
    rig.remote.deliver(6)
    check_output(rig, rig.finish())


def test_samples_wait_for_the_first_one_and_take_its_blocks() -> None:
    rig = make_rig()
    leader, *followers = rig.scheduler.add(remote_request("a", PROMPT, n=3, max_tokens=4))
    assert [s.status for s in followers] == [SequenceStatus.HELD] * 2
    rig.remote.deliver(6)
    check_output(rig, rig.finish())
    assert len(rig.remote.opened) == 1
    assert rig.scheduler.counters.computed_prompt_tokens == 2 * 3
    assert [s.num_cached_tokens for s in (leader, *followers)] == [0, 20, 20]


@pytest.mark.parametrize("sample_index", [None, 0])
def test_an_abort_cancels_the_job_and_frees_its_blocks(sample_index: int | None) -> None:
    rig = make_rig()
    rig.scheduler.add(remote_request("a", PROMPT, n=2, max_tokens=4))
    rig.remote.deliver(2)
    rig.step()
    rig.scheduler.abort("a", sample_index)
    rig.filler.sweep()
    rig.check_integrity()
    assert not rig.remote.jobs
    if sample_index is None:
        assert rig.pool.num_free == rig.pool.num_blocks and not rig.scheduler.has_work
    else:
        rig.step()  # the heir finds what came, and asks for the rest itself
        (again,) = rig.remote.opened[1:]
        assert again.first == 2
        rig.remote.deliver(9)
        check_output(rig, rig.finish())
    assert rig.filler.counters.failed_fetches == 0


def test_two_fills_of_one_prefix_share_its_blocks() -> None:
    rig = make_rig()
    one = rig.scheduler.add(remote_request("a", PROMPT))[0]
    two = rig.scheduler.add(remote_request("b", [*PROMPT, 1]))[0]
    rig.remote.deliver(2, 0)
    rig.remote.deliver(5, 1)
    rig.step()
    assert one.held_blocks == two.held_blocks[:2]
    assert rig.pool.num_free == rig.pool.num_blocks - 5
    rig.remote.deliver(9, 0)
    rig.remote.deliver(9, 1)
    check_output(rig, rig.finish())


def test_running_sequences_never_lack_a_block_for_a_fill() -> None:
    rig = make_rig(num_blocks=12, max_model_len=48)
    rig.scheduler.add(make_request("runs", [1, 2, 3, 4], max_tokens=40, ignore_eos=True))
    rig.step()
    (sequence,) = rig.scheduler.add(remote_request("filled", PROMPT, max_tokens=3))
    rig.remote.deliver(5)
    rig.step()
    assert len(sequence.held_blocks) == 5 and sequence.status is SequenceStatus.FILLING
    while rig.pool.num_free:
        rig.step()
    for _ in range(5):
        rig.step()
    assert rig.scheduler.counters.num_preemptions == 0
    assert sequence.held_blocks == [], "what was held for who waits was not given to who runs"
    check_output(rig, rig.finish())


def test_a_fill_stops_early_where_no_blocks_are_left_for_it() -> None:
    rig = make_rig(num_blocks=12, max_model_len=48)
    (sequence,) = rig.scheduler.add(remote_request("filled", PROMPT, max_tokens=3))
    rig.scheduler.add(make_request("big", distinct(43, 100), max_tokens=2))
    rig.step()
    assert rig.pool.num_free == 1
    rig.remote.deliver(3)
    rig.step()
    assert not rig.remote.jobs and sequence.held_blocks == []
    check_output(rig, rig.finish())
    assert rig.filler.counters.failed_fetches == 0 and rig.scheduler.counters.num_preemptions == 0


def test_the_head_of_the_line_takes_blocks_back_from_who_is_behind_it() -> None:
    rig = make_rig(num_blocks=12, max_model_len=48, max_num_seqs=1)
    rig.scheduler.add(make_request("one", distinct(20, 500), max_tokens=4))
    rig.step()
    rig.scheduler.add(make_request("head", distinct(39, 100), max_tokens=2))
    (behind,) = rig.scheduler.add(remote_request("behind", PROMPT, max_tokens=2))
    rig.remote.deliver(5)
    rig.step()
    assert len(behind.held_blocks) == 5
    finished: list[Sequence] = []
    while len(finished) < 2:
        finished += rig.step()[1]
    assert [s.request_id for s in finished] == ["one", "head"]
    finished += rig.finish()
    check_output(rig, finished)


def test_the_head_of_the_line_takes_nothing_from_who_came_before_it() -> None:
    rig = make_rig(num_blocks=12, max_model_len=48)
    (old,) = rig.scheduler.add(remote_request("old", PROMPT, max_tokens=2))
    rig.remote.deliver(4)
    rig.step()
    rig.scheduler.add(make_request("head", distinct(39, 100), max_tokens=2))
    schedule, _ = rig.step()
    assert schedule.entries == [] and len(old.held_blocks) == 4
    rig.remote.deliver(9)
    finished = rig.finish()
    assert [s.request_id for s in finished] == ["old", "head"] and old.num_fetched_blocks == 5
    check_output(rig, finished)


def test_a_fill_that_has_no_room_is_not_begun_and_tried_again_at_admission() -> None:
    rig = make_rig(num_blocks=12, max_model_len=48)
    rig.scheduler.add(make_request("runs", distinct(32, 300), max_tokens=3))
    rig.step()
    (sequence,) = rig.scheduler.add(remote_request("waits", PROMPT, max_tokens=3))
    assert sequence.status is SequenceStatus.WAITING and not rig.remote.opened
    while not rig.remote.opened:
        rig.step()
    assert sequence.status is SequenceStatus.FILLING
    rig.remote.deliver(9)
    check_output(rig, rig.finish())
    assert sequence.num_fetched_blocks == 5


def test_what_memory_loses_after_a_preemption_comes_back_from_disk() -> None:
    rig = make_rig(num_blocks=12, max_model_len=40, max_num_seqs=2)
    rig.scheduler.add(make_request("old", distinct(16, 300), max_tokens=20, ignore_eos=True))
    (young,) = rig.scheduler.add(make_request("young", distinct(20, 100), max_tokens=20, ignore_eos=True))
    while not young.num_preemptions:
        rig.step()
        rig.write_behind.advance(busy=True)
    rig.write_behind.advance(busy=False)
    finished: list[Sequence] = []
    while not rig.disk.opened and rig.scheduler.has_work:
        finished += rig.step()[1]
    assert young.status is SequenceStatus.FILLING and young.num_preemptions == 1
    rig.disk.deliver(20)
    finished += rig.finish()
    assert rig.filler.counters.disk_hit_blocks > 0
    check_output(rig, finished)


def test_reading_is_left_alone_where_computing_is_faster() -> None:
    rig = make_rig()
    keep_on_disk(rig, PROMPT)
    rig.prefill_rate.add(1_000_000.0, 1.0)
    rig.disk.rate = 1e3
    (sequence,) = rig.scheduler.add(make_request("slow", PROMPT, max_tokens=1))
    assert sequence.status is SequenceStatus.WAITING
    rig.finish()
    rig.scheduler.reset_prefix_cache()
    rig.disk.rate = 1e12
    rig.prefill_rate.add(10.0, 100.0)
    (sequence,) = rig.scheduler.add(make_request("fast", PROMPT, max_tokens=1))
    assert sequence.status is SequenceStatus.FILLING
    rig.disk.deliver(9)
    rig.finish()


def test_a_disk_found_too_slow_is_tried_again_now_and_then() -> None:
    rig = make_rig()
    keep_on_disk(rig, PROMPT)
    rig.prefill_rate.add(1_000_000.0, 1.0)
    rig.disk.rate = 1e3
    for number in range(fill.RETRY_EVERY):
        rig.scheduler.add(make_request(f"r{number}", PROMPT, max_tokens=1))
        if rig.disk.opened:
            break
        rig.finish()
        rig.scheduler.reset_prefix_cache()
    assert len(rig.disk.opened) == 1 and number > 1
    rig.finish()


def test_while_others_run_only_so_many_bytes_are_copied_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    monkeypatch.setattr(fill, "BYTES_PER_STEP", 2 * rig.io.block_bytes)
    rig.scheduler.add(make_request("runs", [1, 2, 3], max_tokens=9, ignore_eos=True))
    rig.step()
    (sequence,) = rig.scheduler.add(remote_request("filled", PROMPT))
    rig.remote.deliver(5)
    held = []
    for _ in range(3):
        rig.step()
        held.append(len(sequence.held_blocks))
    assert held == [2, 4, 5] and rig.filler.wait_s() != 0.0
    rig.remote.deliver()
    check_output(rig, rig.finish())


def test_whoever_waits_for_log_probabilities_of_the_prompt_fetches_nothing() -> None:
    rig = make_rig()
    (sequence,) = rig.scheduler.add(remote_request("a", PROMPT, prompt_logprobs=1))
    assert sequence.status is SequenceStatus.WAITING and not rig.remote.opened
    rig.finish()


def test_a_reset_gives_up_what_fills_hold() -> None:
    rig = make_rig()
    rig.scheduler.add(remote_request("a", PROMPT))
    rig.remote.deliver(3)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.check_integrity()
    assert rig.pool.num_free == rig.pool.num_blocks
    schedule, _ = rig.step()
    assert schedule.num_tokens == 22 and not rig.remote.jobs
    check_output(rig, rig.finish())


def test_a_stop_lets_everyone_go_on_with_what_is_there() -> None:
    rig = make_rig()
    rig.scheduler.add(remote_request("a", PROMPT))
    rig.remote.deliver(3)
    rig.step()
    rig.filler.stop()
    rig.check_integrity()
    assert not rig.remote.jobs
    schedule, _ = rig.step()
    assert schedule.num_tokens == 22 - 12
    (sequence,) = rig.scheduler.add(remote_request("b", [5, *PROMPT]))
    assert sequence.status is SequenceStatus.WAITING
    check_output(rig, rig.finish())
