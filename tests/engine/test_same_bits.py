"""Exact: with kernels that are batch-invariant, the same tokens and the same bits of their log-probabilities,
however the work is cut up, who else is served, and where.

``rowwise`` are kernels in Python that compute each row by itself: what is left then is the engine. ``cpu``
are those that ship, ``int8`` the same on weights in blocks of 8 bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.core.errors import CompilerMissingError, RecordError
from headrace.core.knobs import EngineConfig
from headrace.core.messages import Origin, PackReady
from headrace.core.recording import (
    OTHER_MODEL,
    OTHER_PACK,
    AnswerRecord,
    RecordedRequest,
    RecordedSample,
    float_bits,
)
from headrace.core.request import Request
from headrace.engine.engine import Engine
from headrace.engine.packs import load_native_pack, pack_id_of
from headrace.engine.replay import check_origin, replay
from headrace.engine.start_kernels import Shipped
from headrace.kernels.native.build import find_compiler
from tests.engine import packs as python_packs
from tests.engine.harness import Result, make_request, run
from tests.engine.test_rescue import CASES, rest_of
from tests.packs import pack as cpu_pack

LENGTH = 12
MAX_LEN = 96
_LONG = [(37 * i + 11) % 300 + 2 for i in range(60)]
# shorter and longer than blocks, chunks and sliding windows; two share a prefix
PROMPTS = [[7], [3, 9, 4, 250, 8, 8], _LONG[:13], _LONG, [*_LONG[:33], 5, 6, 7]]
FAMILIES = {
    "rowwise": ("llama", "gemma2"),
    "cpu": ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"),
    "int8": ("llama", "gemma3"),
}
KINDS = [(kind, family) for kind, families in FAMILIES.items() for family in families]
Bits = list[tuple[int, int]]


class Bench:
    """Engines with one model and one pack, equal but for what a test says."""

    def __init__(self, kind: str, model: Path, folder: Path) -> None:
        self.kind = kind
        self.model = model
        self.pack = folder / "pack"
        self.twin = folder / "twin"  # the same kernels under another id
        if kind != "rowwise":
            for path in (self.pack, self.twin):
                cpu_pack.write_pack(path)
            manifest = msgspec.json.decode((self.twin / "pack.json").read_bytes())
            (self.twin / "pack.json").write_bytes(msgspec.json.encode({**manifest, "name": "twin"}))
            self.load: Any = load_native_pack
        else:
            python_packs.write_pack(self.pack, "rowwise")
            python_packs.write_pack(self.twin, "rowwise", name="twin")
            self.load = python_packs.load
        self.woken = threading.Event()

    def engine(self, *, num_blocks: int | None = None, **knobs: Any) -> Engine:
        fields: dict[str, Any] = {
            "dtype": "bfloat16",
            "device": "cpu",
            "threads": 1,
            "pack": str(self.pack),
            "quantization": "int8" if self.kind == "int8" else "auto",
            "max_model_len": MAX_LEN,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 128,
            "block_size": 4,
            "kv_cache_gib": 0.02,
            **knobs,
        }
        engine = Engine(
            EngineConfig(**fields),
            self.model,
            load_pack=self.load,
            shipped=Shipped(folder=Path("/nowhere")),
            wake=self.woken.set,
        )
        if num_blocks is None:
            return engine
        per_block = engine.kv_size.nbytes / engine.kv_size.num_blocks
        return self.engine(**{**knobs, "kv_cache_gib": (num_blocks + 0.5) * per_block / 2**30})

    def alone(self, requests: Sequence[Request]) -> dict[tuple[str, int], Bits]:
        """Each request by itself, its prompt in one piece, nothing cached."""
        engine = self.engine(enable_prefix_caching=False)
        found: dict[tuple[str, int], Bits] = {}
        for request in requests:
            found |= bits(engine, [request])
        return found


def bits(engine: Engine, requests: Sequence[Request], *, stagger: int = 0) -> dict[tuple[str, int], Bits]:
    return {key: bits_of(result) for key, result in run(engine, list(requests), stagger=stagger).items()}


def bits_of(result: Result) -> Bits:
    return [
        (token, float_bits(entry.logprob))
        for token, entry in zip(result.tokens, result.logprobs, strict=True)
    ]


@pytest.fixture(scope="module")
def bench(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    kind, family = request.param
    if kind != "rowwise":
        if len(cpu_pack.OPS) < 3:
            pytest.skip("packs/cpu is not whole")
        try:
            find_compiler()
        except CompilerMissingError as error:
            pytest.skip(str(error))
    model = tiny(family, dtype=torch.bfloat16)
    made = Bench(kind, model, tmp_path_factory.mktemp(f"{kind}-{family}"))
    if kind != "rowwise":
        assert made.engine().origin.batch_invariant
    return made


every_bench = pytest.mark.parametrize(
    "bench", KINDS, indirect=True, ids=[f"{kind}-{family}" for kind, family in KINDS], scope="module"
)
one_of_each = pytest.mark.parametrize(
    "bench",
    [(kind, "llama") for kind in FAMILIES],
    indirect=True,
    ids=list(FAMILIES),
    scope="module",
)


def requests_of(prompts: Sequence[list[int]], **params: Any) -> list[Request]:
    return [
        make_request(str(i), prompt, **{"max_tokens": LENGTH, "logprobs": 0, **params})
        for i, prompt in enumerate(prompts)
    ]


@every_bench
def test_however_the_work_is_cut_up(bench: Bench) -> None:
    requests = requests_of(PROMPTS)
    wanted = bench.alone(requests)
    assert bits(bench.engine(), requests) == wanted, "together"
    for chunk in (1, 2, 5, 16, 63):
        engine = bench.engine(max_num_batched_tokens=chunk)
        assert bits(engine, requests, stagger=2) == wanted, f"in steps of {chunk} tokens"
        again = run(engine, requests)
        assert {key: bits_of(result) for key, result in again.items()} == wanted, "from cached blocks"
        assert again["3", 0].num_cached_tokens == 56
    crowded = bench.engine(num_blocks=-(-MAX_LEN // 4), max_num_batched_tokens=17)
    assert bits(crowded, requests, stagger=1) == wanted
    assert crowded.stats().num_preemptions > 0
    other_blocks = bench.engine(block_size=16, threads=2)
    assert bits(other_blocks, requests, stagger=3) == wanted, "other blocks, other threads"


@one_of_each
def test_in_batches_of_any_size(bench: Bench) -> None:
    prompts = [[i + 2, *_LONG[: (7 * i) % 24], 3 * i % 300] for i in range(64)]
    requests = requests_of(prompts, max_tokens=5)
    wanted = bench.alone(requests[::9])
    engine = bench.engine(enable_prefix_caching=False)
    for size in range(1, 65):
        batch = [*requests[::9], *requests][:size] if size < 8 else requests[:size]
        found = bits(engine, batch)
        for key, expected in wanted.items():
            if key in found:
                assert found[key] == expected, f"{key} among {size}"


@one_of_each
@pytest.mark.parametrize("name", CASES)
def test_sampled_and_rescued(bench: Bench, name: str) -> None:
    """The other engine has another cache, other chunks and other company."""
    params = {"seed": 77, "max_tokens": LENGTH, "logprobs": 0, **CASES[name]}
    request = make_request("r", _LONG[:21], **{**params, "logprobs": 0})
    wanted = bench.alone([request])
    other = bench.engine(max_num_batched_tokens=7)
    run(other, requests_of([_LONG[:9], _LONG[:33]]))
    company = [
        msgspec.structs.replace(one, request_id=f"company {i}") for i, one in enumerate(requests_of(PROMPTS))
    ]
    for cut in (1, 4, LENGTH - 1):
        for (_, sample), expected in wanted.items():
            if cut >= len(expected):
                continue
            tokens = [token for token, _ in expected[:cut]]
            rest = rest_of(request, sample, tokens)
            found = bits(other, [*company[:3], rest, *company[3:]], stagger=1)
            assert found["r", sample] == expected[cut:], f"sample {sample} after {cut} tokens"


def prepare(bench: Bench, engine: Engine, folder: Path) -> str:
    pack_id = pack_id_of(folder)
    bench.woken.clear()
    engine.packs.prepare(pack_id, folder)
    assert bench.woken.wait(280)
    ((_, message),) = engine.packs.take()
    assert isinstance(message, PackReady), message
    return pack_id


@one_of_each
def test_before_and_after_a_swap_to_the_same_pack(bench: Bench) -> None:
    """To the one that runs, prepared anew, and to its twin: what runs goes on, what comes is the same."""
    requests = requests_of(PROMPTS)
    wanted = bench.alone(requests)
    engine = bench.engine(max_num_batched_tokens=9)
    own, twin = pack_id_of(bench.pack), prepare(bench, engine, bench.twin)
    prepare(bench, engine, bench.pack)
    found: dict[tuple[str, int], Result] = {}
    waiting = list(requests)
    turns = [own, twin, own]
    for step in range(1000):
        if waiting and step % 3 == 0:
            engine.add(waiting.pop(0))
        if step % 8 == 7 and turns:
            engine.use_pack(turns.pop(0))
        for output in engine.step().outputs:
            found.setdefault((output.request_id, output.sample_index), Result()).take(output)
        if not waiting and not engine.has_work:
            break
    assert not turns, "all swaps happened under running requests"
    assert {key: bits_of(result) for key, result in found.items()} == wanted
    assert bits(engine, requests, stagger=1) == wanted


def record_of(engine: Engine, requests: Sequence[Request]) -> AnswerRecord:
    """As a gateway makes one, of requests that were served together."""
    origins: dict[tuple[str, int], list[Origin]] = {}
    results: dict[tuple[str, int], Result] = {}
    for request in requests:
        engine.add(msgspec.structs.replace(request, record=True))
    while engine.has_work:
        for output in engine.step().outputs:
            key = output.request_id, output.sample_index
            results.setdefault(key, Result()).take(output)
            if output.origin is not None:
                origins.setdefault(key, []).append(output.origin)
    return AnswerRecord(
        format=1,
        id="cmpl-1",
        caller_id="mine",
        created="2026-01-01",
        model="tiny",
        source="tiny",
        max_model_len=MAX_LEN,
        num_rescues=0,
        requests=[
            RecordedRequest(
                request_id=request.request_id,
                prompt=request.token_ids().tolist(),
                sampling=request.sampling,
                samples=[
                    RecordedSample(
                        token_ids=result.tokens,
                        logprob_bits=[bits for _, bits in bits_of(result)],
                        finish_reason=result.finish_reason or "",
                        origins=origins[name, index],
                    )
                    for (name, index), result in sorted(results.items())
                    if name == request.request_id
                ],
            )
            for request in requests
        ],
    )


@one_of_each
def test_a_record_is_replayed_to_the_bit(bench: Bench) -> None:
    busy = bench.engine(num_blocks=-(-MAX_LEN // 4) + 6, max_num_batched_tokens=11)
    requests = [
        make_request("cmpl-1", _LONG[:40], max_tokens=LENGTH, temperature=1.0, seed=5, n=3),
        make_request("cmpl-1-1", _LONG, max_tokens=LENGTH),
        make_request("cmpl-1-2", _LONG[:30], max_tokens=LENGTH, temperature=0.7, seed=9, top_p=0.9),
    ]
    record = record_of(busy, requests)
    assert busy.stats().num_preemptions > 0
    assert record.origins == [busy.origin] and len(record.requests[0].samples) == 3
    again = bench.engine(max_num_seqs=3)
    notes = check_origin(again, record)
    assert bench.kind == "rowwise" or notes == []
    assert replay(again, record) is None and not again.has_work

    def changed(**fields: Any) -> AnswerRecord:
        first, second, third = record.requests
        one, two, three = first.samples
        two = msgspec.structs.replace(two, **fields)
        first = msgspec.structs.replace(first, samples=[one, two, three])
        return msgspec.structs.replace(record, requests=[first, second, third])

    sample = record.requests[0].samples[1]
    other_bits = [*sample.logprob_bits]
    other_bits[7] ^= 1
    found = replay(again, changed(logprob_bits=other_bits))
    assert found is not None and (found.sample_index, found.position) == (1, 7)
    assert found.recorded[0] == sample.token_ids[7] and "the same token" in str(found)
    other_tokens = [*sample.token_ids]
    other_tokens[3] += 1
    found = replay(again, changed(token_ids=other_tokens))
    assert found is not None and found.position == 3 and "recorded token" in str(found)
    longer = changed(token_ids=[*sample.token_ids, 5], logprob_bits=[*sample.logprob_bits, 0])
    found = replay(again, longer)
    assert found is not None and found.position == LENGTH

    with pytest.raises(RecordError, match="stock operators") as caught:
        check_origin(bench.engine(pack="none"), record)
    assert caught.value.code == OTHER_PACK
    other = msgspec.structs.replace(record.origins[0], revision="another")
    with pytest.raises(RecordError, match="revision 'another'") as caught:
        check_origin(again, changed_origin(record, other))
    assert caught.value.code == OTHER_MODEL
    older = msgspec.structs.replace(record.origins[0], torch="1.0", hardware="abacus")
    assert [note for note in check_origin(again, changed_origin(record, older)) if "abacus" in note]


def changed_origin(record: AnswerRecord, origin: Origin) -> AnswerRecord:
    requests = [
        msgspec.structs.replace(
            request,
            samples=[msgspec.structs.replace(sample, origins=[origin]) for sample in request.samples],
        )
        for request in record.requests
    ]
    return msgspec.structs.replace(record, requests=requests)


@one_of_each
def test_a_swap_to_another_pack_is_in_the_record(bench: Bench) -> None:
    engine = bench.engine()
    twin = prepare(bench, engine, bench.twin)
    engine.add(msgspec.structs.replace(make_request("r", _LONG[:9], max_tokens=8), record=True))
    origins = []
    for step in range(8):
        if step == 4:
            engine.use_pack(twin)
        (output,) = engine.step().outputs
        origins += [output.origin] if output.origin is not None else []
        assert output.logprobs is not None
    assert [origin.pack for origin in origins] == [pack_id_of(bench.pack), twin]
