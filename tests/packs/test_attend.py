"""Attention of the CPU pack: within what its roundings allow, and the same bits for a row in every batch,
chunk and thread count."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.native.abi import DONE, NOT_MINE, Call
from headrace.kernels.native.build import compile_command, cpu_features, find_compiler
from headrace.kernels.native.library import NativeKernel
from headrace.kernels.native.signature import SIGNATURES
from headrace.kernels.weights import AttentionSpec

SHIM = Path(__file__).parent / "attend_shim.cpp"
HEADERS = Path(__file__).parents[2] / "packs" / "cpu"
VARIANTS = {"native": [], "no bf16 dots": ["-mno-avx512bf16"], "avx2": ["-mno-avx512f"]}

# (context, new tokens): decodes far apart in length, chunks with and without history
MIXED = ((700, 1), (3, 1), (0, 1), (127, 1), (128, 1), (300, 150), (0, 130), (17, 40), (250, 9))
CHUNK = 128
FLOAT, HALF = 2.0**-24, 2.0**-8
POWER = 4e-6
"""Relative error of the kernel's exponential."""


@pytest.fixture(scope="module", params=VARIANTS)
def kernel(request: pytest.FixtureRequest, built: Path) -> NativeKernel:
    if request.param == "avx2" and "avx2" not in cpu_features():
        pytest.skip("this CPU has no AVX2")
    target = built / f"attend-{request.param.replace(' ', '-')}.so"
    flags = ["-ffp-contract=off", f"-I{HEADERS}", *VARIANTS[request.param]]
    subprocess.run(compile_command(find_compiler(), SHIM, target, flags), check=True)
    return NativeKernel(target)


@dataclass
class Sequences:
    """Queries, keys and values of a few sequences of tokens, and a cache that has room for them."""

    spec: AttentionSpec
    block_size: int
    q: list[Tensor]
    """One for each sequence: (tokens, heads, head_dim)."""
    k: list[Tensor]
    v: list[Tensor]
    tables: list[list[int]]
    blank: LayerKV
    """Foreign blocks and slots beyond a sequence's end hold large numbers, so that a leak shows."""

    @classmethod
    def make(
        cls,
        lengths: list[int],
        spec: AttentionSpec,
        *,
        block_size: int = 16,
        consecutive: bool = False,
        one_hot: bool = False,
    ) -> Sequences:
        generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))

        def rows(tokens: int, heads: int, dim: int) -> Tensor:
            return torch.randn(tokens, heads, dim, generator=generator)

        q = [rows(n, spec.num_heads, spec.head_dim) for n in lengths]
        k = [rows(n, spec.num_kv_heads, spec.head_dim) for n in lengths]
        v = [rows(n, spec.num_kv_heads, spec.v_head_dim) for n in lengths]
        if one_hot:
            hot = torch.eye(spec.v_head_dim)
            v = [
                hot[torch.arange(n) % spec.v_head_dim][:, None].repeat(1, spec.num_kv_heads, 1)
                for n in lengths
            ]
        counts = [-(-n // block_size) for n in lengths]
        blocks = list(range(1, sum(counts) + 1))
        if not consecutive:
            random.Random(3).shuffle(blocks)
        tables = []
        for count in counts:
            tables.append(blocks[:count])
            blocks = blocks[count:]
        blank = LayerKV.allocate(
            sum(counts) + 2, block_size, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        )
        blank.keys.fill_(1e3)
        blank.values.fill_(1e3)
        return cls(spec, block_size, q, k, v, tables, blank)

    def cache(self, contexts: list[int], dtype: torch.dtype = torch.bfloat16) -> LayerKV:
        """A cache that holds the first tokens of each sequence."""
        spec, blank = self.spec, self.blank
        kv = LayerKV.allocate(
            blank.key_blocks.shape[1],
            self.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            dtype=dtype,
        )
        kv.keys.copy_(blank.keys)
        kv.values.copy_(blank.values)
        for table, k, v, context in zip(self.tables, self.k, self.v, contexts, strict=True):
            token = torch.arange(context)
            slots = torch.tensor(table)[token // self.block_size] * self.block_size + token % self.block_size
            kv.keys[:, slots] = k[:context].transpose(0, 1).bfloat16().to(dtype)
            kv.values[:, slots] = v[:context].transpose(0, 1).bfloat16().to(dtype)
        return kv

    def batch(self, entries: list[tuple[int, int, int]]) -> AttentionBatch:
        """Of (sequence, context, new tokens)."""
        made = [BatchEntry(context, new, self.tables[which]) for which, context, new in entries]
        return AttentionBatch.build(made, self.block_size)

    def rows(self, entries: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            torch.cat([whole[which][context : context + new] for which, context, new in entries])
            for whole in (self.q, self.k, self.v)
        )
        return q, k, v

    def run(
        self, kernel: NativeKernel, kv: LayerKV, entries: list[tuple[int, int, int]], threads: int = 2
    ) -> Tensor:
        """(rows, heads, v_head_dim) of one call, which also writes the rows' keys and values into ``kv``."""
        q, k, v = self.rows(entries)
        out = torch.full((len(q), self.spec.num_heads * self.spec.v_head_dim), float("nan"))
        assert call(kernel, self.spec, kv, self.batch(entries), q, k, v, out, threads) == DONE
        return out.view(len(q), self.spec.num_heads, self.spec.v_head_dim)


def call(
    kernel: NativeKernel,
    spec: AttentionSpec,
    kv: LayerKV,
    batch: AttentionBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    threads: int = 2,
) -> int:
    made = Call(SIGNATURES["attention"], threads)
    chunks = chunk_tables = None
    if batch.prefills:
        chunks = torch.tensor([(p.start, p.end, p.context_len) for p in batch.prefills])
        chunk_tables = torch.zeros(
            len(batch.prefills), max(len(p.block_table) for p in batch.prefills)
        ).long()
        for row, prefill in zip(chunk_tables, batch.prefills, strict=True):
            row[: len(prefill.block_table)] = prefill.block_table
    sinks = None if spec.sinks is None else spec.sinks.float()
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "keys": kv.keys,
        "values": kv.values,
        "slot_mapping": batch.slot_mapping,
        "block_tables": batch.decode_block_tables,
        "lens": batch.decode_lens,
        "chunks": chunks,
        "chunk_tables": chunk_tables,
        "sinks": sinks,
        "out": out,
    }
    for name, tensor in tensors.items():
        made.set_tensor(name, tensor)
    made.set_int("block_size", batch.block_size)
    made.set_int("num_decodes", batch.num_decodes)
    made.set_int("window", spec.sliding_window or 0)
    made.set_int("num_kv_heads", spec.num_kv_heads)
    made.set_float("scale", spec.scale)
    made.set_float("softcap", spec.softcap or 0.0)
    return kernel.run(made.address)


def make_spec(
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
) -> AttentionSpec:
    logits = torch.randn(heads, generator=torch.Generator().manual_seed(5)) if sinks else None
    scale = head_dim**-0.5 if scale is None else scale
    return AttentionSpec(heads, kv_heads, head_dim, v_head_dim or head_dim, scale, window, softcap, logits)


def check(kernel: NativeKernel, sequences: Sequences, new: list[tuple[int, int]]) -> None:
    """Runs (context, new tokens) of each sequence in one call and compares with float64 on bfloat16 q, k, v.

    A score is a chain of head_dim products, so it is off by at most that many roundings of the sum of sizes
    (at most the norms' product), and by a few more of its size and the largest one's in the exponent; with a
    softcap by what its tangent adds. A weight is off by the exponential of that, by the exponential's own
    error and by its rounding to bfloat16; the sum of weights by all but the last. A weighted sum adds a
    rounding for each key of a chunk and a few for each chunk.
    """
    spec = sequences.spec
    entries = [(which, context, count) for which, (context, count) in enumerate(new)]
    q, k, v = (rows.bfloat16().double() for rows in sequences.rows(entries))
    contexts = [context for context, _ in new]
    batch = sequences.batch(entries)
    wide, sizes = (sequences.cache(contexts, torch.float64) for _ in range(2))
    sizes.values.abs_()
    expected = reference.attention(q, k, v, wide, batch, spec)
    weighted = reference.attention(q, k, v.abs(), sizes, batch, spec)

    kv = sequences.cache(contexts)
    out = sequences.run(kernel, kv, entries)
    assert torch.equal(kv.keys.double(), wide.keys)
    assert torch.equal(kv.values.double(), wide.values)

    reach = spec.scale * max(
        float(q.norm(dim=2).max()) * max(float(k.norm(dim=2).max()) for k in sequences.k), 1.0
    )
    score = FLOAT * (spec.head_dim + 8) * reach
    if spec.softcap is not None:
        score += 8 * FLOAT * spec.softcap
    longest = max(context + count for context, count in new)
    weight = 2 * score + POWER + 8 * FLOAT
    sums = FLOAT * (CHUNK + 6 * (longest / CHUNK + 2)) + POWER * (longest / CHUNK + 2)
    bound = weighted * (HALF + 2 * weight + 2 * sums) * 1.01 + 1e-30
    excess = (out.flatten(1).double() - expected).abs() / bound
    assert not excess.isnan().any()
    assert excess.max() <= 1


def mixed(spec: AttentionSpec, **how: object) -> Sequences:
    return Sequences.make([context + new for context, new in MIXED], spec, **how)  # type: ignore[arg-type]


SPECS = {
    "three heads a key head": make_spec(),
    "a key head each": make_spec(3, 3, 32),
    "eight heads a key head": make_spec(8, 1, 128),
    "seven heads a key head": make_spec(7, 1, 96),
    "twenty heads a key head": make_spec(20, 1, 64, window=150),
    "eighty wide": make_spec(4, 2, 80),
    "256 wide": make_spec(4, 1, 256),
    "values wider": make_spec(6, 2, 32, 160),
    "values narrower": make_spec(4, 2, 192, 128),
    "odd widths": make_spec(4, 2, 24, 40),
    "window": make_spec(window=100),
    "window within a register": make_spec(window=7),
    "window of one": make_spec(window=1),
    "softcap": make_spec(softcap=5.0),
    "sinks": make_spec(sinks=True),
    "all rules": make_spec(4, 2, 80, window=140, softcap=20.0, sinks=True),
    "scores far apart": make_spec(scale=4.0),
}


@pytest.mark.parametrize("name", SPECS)
def test_ragged_batch_is_right(kernel: NativeKernel, name: str) -> None:
    check(kernel, mixed(SPECS[name]), list(MIXED))


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 48, 256])
@pytest.mark.parametrize("consecutive", [False, True])
def test_every_block_size_is_right(kernel: NativeKernel, block_size: int, consecutive: bool) -> None:
    check(kernel, mixed(make_spec(window=300), block_size=block_size, consecutive=consecutive), list(MIXED))


@pytest.mark.parametrize("window", [None, 1, 2, 16, 31, 64])
def test_a_row_sees_its_keys_and_no_others(kernel: NativeKernel, window: int | None) -> None:
    """With values that are one-hot, outputs are single keys' weights: 0 or not."""
    spec = make_spec(3, 1, 32, 64, window=window)
    length = 330 if window else 64
    sequences = Sequences.make([length, length], spec, one_hot=True)
    chunk = [(0, 40, length - 40)]
    out = sequences.run(kernel, sequences.cache([40, 0]), chunk)
    decode = sequences.run(
        kernel, sequences.cache([length - 1, length - 1]), [(0, length - 1, 1), (1, length - 1, 1)]
    )
    for position, row in [*enumerate(out, 40), (length - 1, decode[0]), (length - 1, decode[1])]:
        first = max(0, position - window + 1) if window else 0
        seen = torch.zeros(64, dtype=torch.bool)
        seen[torch.arange(first, position + 1) % 64] = True
        assert torch.equal(row > 0, seen.expand_as(row))


def pieces(length: int, size: int) -> list[tuple[int, int]]:
    return [(at, min(size, length - at)) for at in range(0, length, size)]


@pytest.mark.parametrize(
    "name",
    [
        "three heads a key head",
        "all rules",
        "eight heads a key head",
        "twenty heads a key head",
        "a key head each",
    ],
)
def test_a_rows_bits_depend_on_its_sequence_alone(kernel: NativeKernel, name: str) -> None:
    """Every chunking, decodes among them, alone or beside others, on any number of threads."""
    length = 333
    sequences = Sequences.make([length, 700], SPECS[name])
    whole = sequences.run(kernel, sequences.cache([0, 0]), [(0, 0, length)], threads=2)
    for size in (1, 3, 16, 17, 64, 150):
        for threads in (1, 2, 3, 5) if size != 1 else (2,):
            kv = sequences.cache([0, 0])
            parts = [
                sequences.run(kernel, kv, [(0, at, count)], threads) for at, count in pieces(length, size)
            ]
            assert torch.equal(torch.cat(parts), whole), f"chunks of {size}, {threads} threads"
    for threads in (1, 2, 3, 5):
        kv = sequences.cache([0, 699])
        beside = sequences.run(kernel, kv, [(1, 699, 1), (0, 0, length)], threads)
        assert torch.equal(beside[1:], whole)
        kv = sequences.cache([0, 300])
        beside = sequences.run(kernel, kv, [(1, 300, 400), (0, 0, length)], threads)
        assert torch.equal(beside[400:], whole)


@pytest.mark.parametrize("window", [None, 1000])
def test_long_decodes_and_short_chunks_are_shared_out_without_a_trace(
    kernel: NativeKernel, window: int | None
) -> None:
    length = 3000
    spec = make_spec(4, 2, 64, window=window, sinks=True)
    sequences = Sequences.make([length, 40], spec)
    tail = (0, length - 9, 9)
    alone = sequences.run(kernel, sequences.cache([length - 9, 0]), [tail], threads=1)
    for threads in (2, 3, 5):
        assert torch.equal(sequences.run(kernel, sequences.cache([length - 9, 0]), [tail], threads), alone)
    for threads in (1, 2, 3, 5):
        kv = sequences.cache([length - 1, 39])
        assert torch.equal(sequences.run(kernel, kv, [(0, length - 1, 1)], threads)[0], alone[-1])
        both = sequences.run(kernel, kv, [(0, length - 1, 1), (1, 39, 1)], threads)
        assert torch.equal(both[0], alone[-1])
    check(kernel, Sequences.make([40, length], spec), [(39, 1), (length - 5, 5)])


def test_blocks_before_a_window_are_not_read(kernel: NativeKernel) -> None:
    """Their entries of the block table may be anything, and what is there may be no number."""
    spec = make_spec(window=50)
    sequences = Sequences.make([400], spec)
    expected = [
        sequences.run(kernel, sequences.cache([context]), [(0, context, new)])
        for context, new in ((399, 1), (340, 60))
    ]
    for (context, new), right in zip(((399, 1), (340, 60)), expected, strict=True):
        kv = sequences.cache([context])
        first = (context + 1 - 50) // 16
        for block in sequences.tables[0][:first]:
            kv.keys[:, block * 16 : block * 16 + 16] = float("nan")
            kv.values[:, block * 16 : block * 16 + 16] = float("nan")
        given_back = replace(sequences, tables=[[-1] * first + sequences.tables[0][first:]])
        assert torch.equal(given_back.run(kernel, kv, [(0, context, new)]), right)


def test_a_later_key_that_is_no_number_stays_its_own(kernel: NativeKernel) -> None:
    sequences = Sequences.make([200], make_spec())
    whole = sequences.run(kernel, sequences.cache([0]), [(0, 0, 200)])
    sequences.k[0][150] = float("nan")
    out = sequences.run(kernel, sequences.cache([0]), [(0, 0, 200)])
    assert torch.equal(out[:150], whole[:150])
    assert out[150:].isnan().all()


def test_what_does_not_fit_is_not_covered(kernel: NativeKernel) -> None:
    spec = make_spec()
    sequences = Sequences.make([40], spec)
    kv = sequences.cache([0])
    entries = [(0, 0, 40)]
    q, k, v = sequences.rows(entries)
    out = torch.zeros(40, spec.num_heads * spec.v_head_dim)
    far = replace(sequences, tables=[[1, 2, 99]])
    assert (
        call(
            kernel,
            spec,
            kv,
            replace(sequences.batch(entries), prefills=far.batch(entries).prefills),
            q,
            k,
            v,
            out,
        )
        == NOT_MINE
    )
    wide = sequences.cache([0], torch.float32)
    assert call(kernel, spec, wide, sequences.batch(entries), q, k, v, out) == NOT_MINE
