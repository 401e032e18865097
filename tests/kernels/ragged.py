"""Random ragged batches over a random cache, and the float64 reference's answer."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.weights import AttentionSpec

BLOCK_SIZE = 16
# (context, new tokens): decodes from the first token to far apart in length, chunks with and without history
MIXED = ((700, 1), (3, 1), (0, 1), (300, 150), (0, 130), (17, 40))


@dataclass
class Case:
    batch: AttentionBatch
    spec: AttentionSpec
    kv: LayerKV
    q: Tensor
    k: Tensor
    v: Tensor
    expected: Tensor
    expected_kv: LayerKV

    def check(self, out: Tensor, tolerance: float) -> None:
        """``out`` within ``tolerance`` of the largest expected value, and the cache holding k and v."""
        error = (out.double() - self.expected).abs().max() / self.expected.abs().max()
        assert error < tolerance
        assert torch.equal(self.kv.keys.double(), self.expected_kv.keys)
        assert torch.equal(self.kv.values.double(), self.expected_kv.values)


def tables(
    entries: tuple[tuple[int, int], ...], *, consecutive: bool, seed: int = 0
) -> tuple[list[BatchEntry], int]:
    """Entries with their own blocks, and the number of blocks that takes (block 0 belongs to nobody)."""
    counts = [-(-(context + new) // BLOCK_SIZE) for context, new in entries]
    blocks = list(range(1, sum(counts) + 1))
    if not consecutive:
        random.Random(seed).shuffle(blocks)
    made = []
    for (context, new), count in zip(entries, counts, strict=True):
        made.append(BatchEntry(context, new, blocks[:count]))
        blocks = blocks[count:]
    return made, sum(counts) + 1


def make_case(
    dtype: torch.dtype,
    *,
    entries: tuple[tuple[int, int], ...] = MIXED,
    consecutive: bool = False,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    v_head_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
    one_projection: bool = True,
    row_dtype: torch.dtype | None = None,
) -> Case:
    """Inputs in ``dtype`` (rows in ``row_dtype``); unowned slots hold large numbers, so a leak shows."""
    generator = torch.Generator().manual_seed(1)
    v_dim = v_head_dim or head_dim
    made, num_blocks = tables(entries, consecutive=consecutive)
    batch = AttentionBatch.build(made, BLOCK_SIZE)
    spec = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        v_dim,
        head_dim**-0.5 if scale is None else scale,
        window,
        softcap,
        torch.randn(heads, generator=generator) if sinks else None,
    )
    kv = LayerKV.allocate(num_blocks, BLOCK_SIZE, kv_heads, head_dim, v_dim, dtype=dtype)
    kv.keys.copy_(torch.randn(kv.keys.shape, generator=generator))
    kv.values.copy_(torch.randn(kv.values.shape, generator=generator))
    for cache in (kv.keys, kv.values):
        cache[:, :BLOCK_SIZE] = 1e3
    for entry in made:
        last = (entry.context_len + entry.num_new_tokens) % BLOCK_SIZE
        if last:
            start = entry.block_table[-1] * BLOCK_SIZE
            kv.keys[:, start + last : start + BLOCK_SIZE] = 1e3
            kv.values[:, start + last : start + BLOCK_SIZE] = 1e3
    tokens, q_width, k_width = batch.num_tokens, heads * head_dim, kv_heads * head_dim
    rows = torch.randn(tokens, q_width + k_width + kv_heads * v_dim, generator=generator).to(dtype)
    rows = rows.to(row_dtype or dtype)
    q = rows[:, :q_width].view(tokens, heads, head_dim)
    k = rows[:, q_width : q_width + k_width].view(tokens, kv_heads, head_dim)
    v = rows[:, q_width + k_width :].view(tokens, kv_heads, v_dim)
    if not one_projection:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    wide = LayerKV.allocate(num_blocks, BLOCK_SIZE, kv_heads, head_dim, v_dim, dtype=torch.float64)
    wide.keys.copy_(kv.keys)
    wide.values.copy_(kv.values)
    expected = reference.attention(q.double(), k.double(), v.double(), wide, batch, spec)
    return Case(batch, spec, kv, q, k, v, expected, wide)
