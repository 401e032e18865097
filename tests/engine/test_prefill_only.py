"""Prompts computed for other replicas, over digests (``kv_oracle``): what is sent is true, in order, once."""

from __future__ import annotations

import pytest

from headrace.core.identity import block_identities
from headrace.core.request import pack_tokens
from headrace.engine import prefill_only
from headrace.engine.sequence import SequenceStatus
from headrace.kvcache.connector import SendJob
from tests.engine.kv_oracle import make_request
from tests.engine.scheduling import ROOT, distinct, make_scheduler
from tests.engine.sources import FillingRig, ListStream, true_payloads

PROMPT = distinct(22)  # of 4 a block: five full ones


def make_rig(**config: int) -> FillingRig:
    return FillingRig(make_scheduler(**config))


def ask(rig: FillingRig, prompt: list[int], *, first: int = 0, room: int = 1000) -> ListStream:
    stream = ListStream(room)
    rig.prefiller.start(SendJob("key", pack_tokens(prompt), first), stream)
    return stream


def expected(prompt: list[int], first: int = 0) -> list[tuple[int, bytes, bytes]]:
    packed = pack_tokens(prompt)
    payloads = true_payloads(packed, 4)
    return list(zip(range(len(payloads)), block_identities(ROOT, packed, 4), payloads, strict=True))[first:]


def test_blocks_go_out_as_they_are_computed_and_nothing_is_sampled() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    stream = ask(rig, PROMPT)
    sent = []
    while stream.reason is None:
        schedule, _ = rig.step()
        assert not any(entry.samples for entry in schedule.entries)
        sent.append((len(stream.blocks), stream.is_computed))
    assert sent == [(2, False), (4, False), (5, True)]
    assert stream.blocks == expected(PROMPT) and stream.reason == ""
    assert not rig.scheduler.has_work and rig.pool.num_free == rig.pool.num_blocks
    assert rig.scheduler.counters.generation_tokens == 0
    assert (rig.prefiller.num_sent_blocks, rig.prefiller.num_sent_bytes) == (5, 5 * 64)


def test_what_is_cached_goes_out_without_being_computed() -> None:
    rig = make_rig()
    rig.scheduler.add(make_request("earlier", PROMPT, max_tokens=1))
    rig.finish()
    computed = rig.scheduler.counters.computed_prompt_tokens
    stream = ask(rig, PROMPT[:20])
    schedule, _ = rig.step()
    assert schedule.entries == [] and stream.blocks == expected(PROMPT) and stream.reason == ""
    assert rig.scheduler.counters.computed_prompt_tokens == computed


def test_only_what_the_receiver_lacks_is_sent() -> None:
    rig = make_rig()
    stream = ask(rig, PROMPT, first=3)
    rig.step()
    assert stream.blocks == expected(PROMPT, 3) and stream.reason == ""
    stream = ask(rig, PROMPT, first=5)
    rig.step()
    assert stream.blocks == [] and stream.reason == ""


def test_blocks_wait_for_room_and_cannot_be_evicted_meanwhile() -> None:
    rig = make_rig(num_blocks=12, max_model_len=40)
    stream = ask(rig, PROMPT, room=2)
    rig.step()
    assert len(stream.blocks) == 2 and stream.is_computed and rig.scheduler.num_running == 1
    rig.scheduler.add(make_request("other", distinct(25, 200), max_tokens=1))
    rig.step()
    assert rig.pool.num_free == 12 - 5 and rig.prefiller.wait_s() not in (None, 0.0)
    stream.num_free += 3
    assert rig.prefiller.wait_s() == 0.0
    rig.step()
    assert stream.blocks == expected(PROMPT) and rig.pool.num_free == 12


def test_a_receiver_that_takes_nothing_loses_its_lease() -> None:
    rig = make_rig()
    stream = ask(rig, PROMPT, room=1)
    rig.step()
    rig.now += prefill_only.LEASE_S - 1.0
    rig.step()
    assert stream.reason is None
    rig.now += 2.0
    rig.step()
    assert stream.reason and rig.pool.num_free == rig.pool.num_blocks and not rig.scheduler.has_work


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_job_frees_its_blocks_before_the_next_step(steps: int) -> None:
    rig = make_rig(max_num_batched_tokens=8)
    stream = ask(rig, PROMPT)
    for _ in range(steps):
        rig.step()
    rig.prefiller.cancel("key")
    rig.prefiller.cancel("unknown")
    assert rig.num_wakes >= 3 and rig.prefiller.wait_s() == 0.0
    schedule, _ = rig.step()
    assert schedule.entries == [] and stream.reason == "cancelled"
    assert rig.pool.num_free == rig.pool.num_blocks and not rig.scheduler.has_work


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    rig = make_rig(num_blocks=12, max_model_len=48, max_num_batched_tokens=12)
    rig.scheduler.add(make_request("old", [1, 2, 3], max_tokens=44, ignore_eos=True))
    rig.step()
    stream = ask(rig, PROMPT, room=3)
    rig.step()
    (prompt,) = rig.prefiller.prompts
    while not prompt.num_preemptions:
        rig.step()
        rig.now += 0.1
    assert len(stream.blocks) == 3 and prompt.status is SequenceStatus.PREEMPTED
    stream.num_free += 10
    rig.finish()
    assert stream.blocks == expected(PROMPT) and stream.reason == ""


def test_prompts_share_a_step_with_everybody_else() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.scheduler.add(make_request("runs", [1, 2, 3], max_tokens=8, ignore_eos=True))
    rig.step()
    stream = ask(rig, PROMPT)
    for _ in range(3):
        schedule, _ = rig.step()
        assert [entry.sequence.request_id for entry in schedule.entries[:1]] == ["runs"]
        assert schedule.num_tokens == 8 or stream.reason == ""
    rig.finish()
    assert stream.blocks == expected(PROMPT)


def test_a_prompt_comes_from_disk_where_it_was_written() -> None:
    rig = make_rig()
    rig.scheduler.add(make_request("earlier", PROMPT, max_tokens=1))
    rig.finish()
    rig.write_behind.advance(busy=False)
    rig.scheduler.forget_cached()
    computed = rig.scheduler.counters.computed_prompt_tokens
    stream = ask(rig, PROMPT)
    rig.step()
    rig.disk.deliver(6)
    rig.step()
    assert stream.blocks == expected(PROMPT) and stream.reason == ""
    assert rig.scheduler.counters.computed_prompt_tokens == computed


@pytest.mark.parametrize("prompt", [distinct(101), distinct(98)])
def test_a_prompt_that_cannot_be_served_is_refused_with_the_reason(prompt: list[int]) -> None:
    rig = make_rig(max_model_len=90)
    stream = ask(rig, prompt)
    rig.step()
    assert stream.reason and "90" in stream.reason and not rig.scheduler.has_work


def test_what_is_computed_before_a_reset_is_not_handed_out_after_it() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    stream = ask(rig, PROMPT, room=1)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    stream.num_free += 10
    rig.step()
    assert len(stream.blocks) == 1 and stream.reason and not rig.scheduler.has_work


def test_a_prefiller_that_refuses_ends_what_runs_and_what_comes() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    stream = ask(rig, PROMPT)
    rig.step()
    rig.prefiller.refuse("gone")
    late = ask(rig, PROMPT)
    rig.step()
    assert stream.reason == late.reason == "gone" and rig.pool.num_free == rig.pool.num_blocks


def test_a_job_is_told_when_somebody_else_ended_its_prompt() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    stream = ask(rig, PROMPT)
    rig.step()
    (prompt,) = rig.prefiller.prompts
    rig.prefiller.failed(prompt, "not finite")
    rig.check_integrity()
    assert stream.reason == "not finite" and rig.pool.num_free == rig.pool.num_blocks
