"""The engine's own duties: faults, aborts, swaps, events, stats, memory."""

from __future__ import annotations

import math
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import InsufficientMemoryError, ModelNotFoundError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.launch import MachineShare
from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared, Timing
from headrace.engine import memory
from headrace.engine.engine import Engine
from headrace.kernels.table import OpTable
from headrace.models.decoder import Decoder
from tests.engine.harness import make_engine, make_request, run, run_tokens

POISON = 299


def poison(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of token 299 become NaN."""
    forward = engine.runner.model.forward

    def poisoned(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = forward(token_ids, *rest)
        return hidden.masked_fill((token_ids == POISON).unsqueeze(1), math.nan)

    monkeypatch.setattr(engine.runner.model, "forward", poisoned)


def test_nan_fails_one_request_and_no_other(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("llama")
    good = [make_request(str(i), [3 + i, 4, 5], temperature=float(i % 2), seed=i) for i in range(4)]
    expected = run_tokens(make_engine(folder), good)
    engine = make_engine(folder)
    poison(engine, monkeypatch)
    bad = [
        make_request("greedy", [3, POISON]),
        make_request("drawn", [4, POISON], temperature=1.0, n=3, seed=1),
        make_request("penalised", [5, POISON], presence_penalty=1.0, logprobs=2),
    ]
    for request in [good[0], bad[0], good[1], bad[1], good[2], bad[2], good[3]]:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    failed = []
    while engine.has_work:
        step = engine.step()
        failed += step.failed
        for output in step.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    assert sorted(f.request_id for f in failed) == ["drawn", "greedy", "penalised"]
    assert {(f.status, f.kind, f.code) for f in failed} == {(500, "server_error", "engine_error")}
    assert [tokens[request.request_id] for request in good] == expected
    assert set(tokens) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_in_the_cache_does_not_outlive_its_request(tiny: Callable[..., Path], dtype: str) -> None:
    folder = tiny("llama")
    prompts = [[3, 4], [5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
    good = [make_request(str(i), prompt) for i, prompt in enumerate(prompts)]
    expected = run_tokens(make_engine(folder, num_blocks=20, dtype=dtype), good)
    engine = make_engine(folder, num_blocks=20, dtype=dtype)
    assert isinstance(engine.runner.model, Decoder)
    engine.runner.model._embedding[POISON] = math.nan
    for _ in range(2):  # the second finds no blocks of the first
        engine.add(make_request("bad", [20, 21, 22, 23, POISON, *range(30, 70)]))
        steps = []
        while engine.has_work:
            steps.append(engine.step())
        assert [failed.request_id for step in steps for failed in step.failed] == ["bad"]
        assert len(steps) == 3 and engine.block_pool.num_cached == 0
        assert run_tokens(engine, good) == expected


def test_a_model_that_raises_fails_its_step_and_lives_on(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("llama")
    engine = make_engine(folder, max_num_seqs=2)
    requests = [make_request(str(i), [3 + i, 4, 5], n=1 + i % 2, temperature=0.5, seed=i) for i in range(4)]
    expected = run(make_engine(folder), requests[2:])
    for request in requests:
        engine.add(request)
    engine.step()

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("a kernel went wrong")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "forward", broken)
        step = engine.step()
    running = {failed.request_id for failed in step.failed}
    assert running == {"0", "1"} and len(step.failed) == 2 and step.outputs == []
    assert "a kernel went wrong" in step.failed[0].message and step.failed[0].status == 500
    engine.check_integrity()
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault((output.request_id, output.sample_index), []).extend(output.token_ids)
    assert tokens == {key: result.tokens for key, result in expected.items()}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_aborts_at_random_moments_lose_no_block(tiny: Callable[..., Path]) -> None:
    """Whatever is aborted and when, the others get the tokens they would have got."""
    folder = tiny("llama")
    rng = random.Random(4)
    requests = [
        make_request(
            str(i),
            [rng.randrange(2, 300) for _ in range(rng.randrange(1, 30))],
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.randrange(1, 16),
            temperature=1.0,
            seed=i,
        )
        for i in range(40)
    ]
    engine = make_engine(folder, num_blocks=30, max_num_seqs=5, max_num_batched_tokens=12)
    alive = {r.request_id: set(range(r.sampling.n)) for r in requests}
    tokens: dict[tuple[str, int], list[int]] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.6:
            engine.add(waiting.pop(0))
        if rng.random() < 0.3:
            request = rng.choice(requests)
            sample = rng.choice([None, 0, 1, 2])
            ended = engine.abort(request.request_id, sample)
            gone = set(alive[request.request_id]) if sample is None else {sample}
            if ended:
                alive[request.request_id] -= gone
            assert ended <= len(gone)
        for output in engine.step().outputs:
            assert output.sample_index in alive[output.request_id], "output after an abort"
            tokens.setdefault((output.request_id, output.sample_index), []).extend(output.token_ids)
        engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert any(len(s) < r.sampling.n for r, s in zip(requests, alive.values(), strict=True))
    whole = run(make_engine(folder), requests)
    finished = [key for key, result in whole.items() if tokens.get(key) == result.tokens]
    assert len(finished) > 10
    assert all(whole[key].tokens[: len(found)] == found for key, found in tokens.items())


def test_ops_are_swapped_at_the_next_step(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"))
    calls = 0
    reference = OpTable.reference()

    def counted(*arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return reference.logits_head(*arguments, **named)

    engine.add(make_request("r", [3, 4, 5], max_tokens=4))
    first = engine.step().outputs[0].token_ids
    before = engine.runner.model.ops
    engine.set_ops(before.replace(source="test", logits_head=counted))
    assert engine.runner.model.ops is before
    rest = [token for _ in range(3) for token in engine.step().outputs[0].token_ids]
    assert calls == 3 and engine.runner.model.ops.provenance["logits_head"] == "test"
    assert (
        first + rest
        == run_tokens(make_engine(tiny("llama")), [make_request("r", [3, 4, 5], max_tokens=4)])[0]
    )


def test_what_other_ops_computed_is_not_reused(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"))
    prompt = list(range(3, 20))
    num_requests = 0

    def cached() -> int:
        nonlocal num_requests
        num_requests += 1
        result = run(engine, [make_request(str(num_requests), prompt, max_tokens=2)])
        return result[str(num_requests), 0].num_cached_tokens

    assert (cached(), cached()) == (0, 16)
    ops = engine.runner.model.ops
    engine.set_ops(ops.replace(source=ops.provenance["linear"], linear=ops.linear))
    assert cached() == 16, "a table of the same provenance computes the same"
    # one request runs across the swap: it goes on, and none of its blocks is cached
    engine.add(make_request("across", prompt, max_tokens=12))
    engine.step()
    engine.take_events()
    engine.set_ops(ops.replace(source="pack", linear=ops.linear))
    while engine.has_work:
        assert engine.step().outputs
        engine.check_integrity()
    assert [type(event) for event in engine.take_events()[1]] == [CacheCleared]
    assert (cached(), cached()) == (0, 16)


def test_replicas_agree_on_identities_when_their_weights_are_the_same(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny("llama"), tmp_path / "elsewhere", copy_function=shutil.copyfile)
    one, other = (make_engine(folder).hello_fields for folder in (tiny("llama"), copy))
    assert one["model_revision"] and one["root_identity"] == other["root_identity"]
    named = Engine(EngineConfig(device="cpu", threads=1, kv_cache_gib=0.02), copy, revision="r")
    assert named.hello_fields["model_revision"] == "r"


def test_events_tell_what_can_be_reused(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"), num_blocks=16, max_model_len=40)
    known: set[bytes] = set()
    expected_seq = 0
    for i in range(6):
        run(engine, [make_request(str(i), [i + 2] * 17, max_tokens=5)])
        first, events = engine.take_events()
        assert first == expected_seq
        expected_seq += len(events)
        for event in events:
            if isinstance(event, BlocksStored):
                known |= set(event.block_ids)
            else:
                assert isinstance(event, BlocksRemoved) and known >= set(event.block_ids)
                known -= set(event.block_ids)
    assert 0 < len(known) <= 16
    assert any(isinstance(event, BlocksRemoved) for event in events)


def test_stats_add_up(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"), max_num_seqs=2)
    for i in range(3):
        engine.add(make_request(str(i), [9] * 9, max_tokens=3))
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 3)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert 0 < stats.kv_cache_usage < 1
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.generation_tokens == 9 and stats.prompt_tokens == 27
    assert stats.prefix_cache_hits == 27 - stats.computed_prompt_tokens > 0
    assert stats.kv_cache_usage == 0


def test_what_it_says_of_itself(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"), max_model_len=None)
    fields = engine.hello_fields
    assert (
        fields["max_model_len"] == 512
        and fields["vocab_size"] == 320
        and fields["device"] == "cpu (1 threads)"
    )
    assert fields["num_blocks"] * 4 * 3 * 2 * 2 * 16 * 4 == fields["kv_bytes"]
    # whatever makes keys and values differ changes the identity of blocks
    others = [
        make_engine(tiny("llama"), dtype="bfloat16"),
        make_engine(tiny("llama"), block_size=8),
        make_engine(tiny("llama", head_dim=8)),
    ]
    roots = {e.hello_fields["root_identity"] for e in [engine, *others]}
    assert len(roots) == 4
    assert make_engine(tiny("llama")).hello_fields["root_identity"] == fields["root_identity"]


def test_more_positions_than_the_model_has_are_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"513.*512") as caught:
        make_engine(tiny("llama"), max_model_len=513)
    assert caught.value.param == "--max-model-len"
    with pytest.raises(ModelNotFoundError):
        make_engine(tiny("llama") / "nothing")


def test_too_little_memory_says_how_much_and_which_flag(tiny: Callable[..., Path]) -> None:
    with pytest.raises(InsufficientMemoryError, match=r"512 tokens needs 0\.000\d* GiB") as caught:
        make_engine(tiny("llama"), max_model_len=512, kv_cache_gib=1e-5)
    assert "--max-model-len" in (caught.value.hint or "") and "--kv-cache-gib" in (caught.value.hint or "")
    with pytest.raises(InsufficientMemoryError, match="100000 GiB") as caught:
        make_engine(tiny("llama"), kv_cache_gib=1e5)
    assert caught.value.param == "--kv-cache-gib"


GIB = memory.GIB


@pytest.mark.parametrize(
    ("knobs", "max_len", "free_gib", "expected_gib"),
    [
        ({}, 1024, 100, 4),  # 64 sequences would take 64 GiB: the default's cap
        ({"max_num_seqs": 2}, 1024, 100, 2),  # what the sequences need
        ({}, 1024, 6, 3),  # half of what is free
        ({}, 8192, 20, 8),  # one request, above the cap
        ({"kv_cache_gib": 1.5}, 1024, 100, 1.5),
    ],
)
def test_size_of_the_cache(knobs: dict[str, Any], max_len: int, free_gib: float, expected_gib: float) -> None:
    """With 1 MiB a token."""
    config = EngineConfig(block_size=16, **knobs)
    size = memory.size_kv_cache(config, max_len, 16 * 2**20, int(free_gib * GIB))
    assert size.nbytes == size.num_blocks * 16 * 2**20 == int(expected_gib * GIB)


def test_a_card_is_filled() -> None:
    """Nothing else wants its memory: nine tenths of it, and no more than the sequences can use."""
    config = EngineConfig(block_size=16)
    size = memory.size_kv_cache(config, 8192, 16 * 2**20, 100 * GIB, on_card=True)
    assert size.nbytes == 90 * GIB
    size = memory.size_kv_cache(config, 512, 16 * 2**20, 100 * GIB, on_card=True)
    assert size.nbytes == 32 * GIB


def test_memory_that_cannot_suffice() -> None:
    config = EngineConfig(block_size=16)
    with pytest.raises(InsufficientMemoryError, match=r"8\.000 GiB.*4\.000 GiB") as caught:
        memory.size_kv_cache(config, 8192, 16 * 2**20, 8 * GIB)
    assert caught.value.hint is not None and "--max-model-len to 4096" in caught.value.hint
    with pytest.raises(InsufficientMemoryError):
        memory.size_kv_cache(config, 8192, 16 * 2**20, -GIB)


def test_a_share_bounds_what_is_free() -> None:
    cpu = torch.device("cpu")
    everything = memory.available_bytes(cpu, MachineShare())
    assert 2**20 < everything < 2**50
    assert memory.available_bytes(cpu, MachineShare(num_replicas=2, memory_bytes=10**6)) == 10**6
    assert memory.available_bytes(cpu, MachineShare(memory_bytes=2**60)) < 2**50


def test_replicas_divide_the_cores(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.engine.num_cores", lambda: 3)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01)
    for num_replicas, expected in ((1, 3), (2, 1), (9, 1)):
        engine = Engine(config, tiny("llama"), share=MachineShare(num_replicas=num_replicas))
        assert engine.num_threads == expected
    torch.set_num_threads(1)


def test_weights_larger_than_memory_are_refused_before_loading(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device, share: 1000)
    with pytest.raises(InsufficientMemoryError, match="weights need") as caught:
        make_engine(tiny("llama"))
    assert "smaller model" in (caught.value.hint or "")


def test_first_tokens_say_where_the_time_went(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"), max_num_seqs=1)
    prompt = list(range(2, 22))
    for name in ("first", "second"):
        engine.add(make_request(name, prompt, max_tokens=3))
    timings: dict[str, list[Timing | None]] = {"first": [], "second": []}
    while engine.has_work:
        for output in engine.step().outputs:
            timings[output.request_id].append(output.timing)
    assert [[t is not None for t in times] for times in timings.values()] == [[True, False, False]] * 2
    first, second = timings["first"][0], timings["second"][0]
    assert first is not None and second is not None
    assert (first.num_computed_tokens, second.num_computed_tokens) == (20, 4)
    assert first.queue_s >= 0 and first.prefill_s > 0 and second.prefill_s > 0
    assert second.queue_s > first.prefill_s, "it waited until the other had ended"


def test_the_way_to_the_engine_counts_as_waiting(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"))
    now = time.monotonic()
    engine.add(make_request("early", [5, 6, 7]), now - 50.0)
    engine.add(make_request("another clock", [5, 6, 8]), now + 1e6)
    waited = {o.request_id: o.timing.queue_s for o in engine.step().outputs if o.timing is not None}
    assert waited["early"] >= 50.0 > waited["another clock"] >= 0.0


def test_says_on_what_it_runs(tiny: Callable[..., Path]) -> None:
    hardware = make_engine(tiny("llama")).hello_fields["hardware"]
    assert re.fullmatch(r"cpu x1 \S.*", hardware)
