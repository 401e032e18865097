"""How sequences end: stop rules, rescue, refusals, several samples, abort."""

from __future__ import annotations

import pytest

from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.engine.sequence import SequenceStatus
from tests.engine.kv_oracle import EOS, make_request
from tests.engine.scheduling import distinct, finish, make_scheduler, shape, step

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
