"""Weights in quantized blocks: what they are filled with, and products whose activations are rounded.

Blocks are any that a file may hold: every bit of numbers and scales is drawn, with scales that keep a product
about as large as its input, a few blocks much larger and a few zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import composite, stock
from headrace.kernels.block_layout import BLOCK_SIZES, TYPES, header, lay_out
from headrace.kernels.blocks import part_rows
from headrace.kernels.table import OpTable
from headrace.kernels.weights import PackedLinear
from headrace.optimize.judge.problem import TensorSpec

GROUP = 32
"""Activations that share a scale where they are rounded to 8 bits."""

_POOL = 4096
"""Different blocks of a format; which of them stands where is drawn for each place."""
_OUTLIERS, _LARGER, _ZEROS = 0.002, 5.0, 0.001


def fill_blocks(buffer: Tensor, spec: TensorSpec, seed: int) -> None:
    """``buffer`` (bytes,) in place: its header and a block at every place."""
    random = np.random.default_rng(seed & (2**63 - 1))
    rows, in_features = spec.matrix
    placed, size = lay_out(spec.parts, in_features)
    assert buffer.shape == (size,) and sum(part.rows for part in placed) == rows
    buffer.zero_()
    start = header(placed)
    buffer[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    for part in placed:
        pool = _pool(part.format, in_features, random)
        where = random.integers(len(pool), size=part.rows * in_features // _elements(part.format))
        part_rows(buffer, part, in_features).copy_(
            torch.from_numpy(pool[where].reshape(part.rows, -1)), non_blocking=False
        )


def nudge_blocks(buffer: Tensor, spec: TensorSpec, seed: int) -> None:
    """One block of every row becomes another one, away from the row's ends where it has any middle."""
    random = np.random.default_rng(seed & (2**63 - 1))
    in_features = spec.matrix[1]
    for part in lay_out(spec.parts, in_features)[0]:
        pool = _pool(part.format, in_features, random)
        count = in_features // _elements(part.format)
        where = torch.from_numpy(random.integers(count // 4, max(count // 4 + 1, 3 * count // 4), part.rows))
        blocks = part_rows(buffer, part, in_features).view(part.rows, count, -1)
        blocks[torch.arange(part.rows), where] = torch.from_numpy(
            pool[random.integers(len(pool), size=part.rows)]
        )


def round_groups(x: Tensor) -> Tensor:
    """x as products with blocks see it: in each group of 32 multiples of its largest magnitude / 127."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    groups = groups.to(torch.promote_types(x.dtype, torch.float32))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 127.0
    rounded = torch.where(scale > 0, groups / scale, 0.0).round_() * scale
    return rounded.view(x.shape).to(x.dtype)


def standing_in(table: OpTable, *, rounds: bool) -> OpTable:
    """``table`` for a model whose weights are blocks: these become numbers once, and products with them are
    float32; ``rounds``: with activations rounded to 8 bits first."""
    linear: Callable[..., Tensor] = table.linear
    known: dict[int, tuple[PackedLinear, Tensor]] = {}

    def product(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
        if packed.form != "blocks":
            return linear(x, packed, residual)
        if id(packed) not in known:
            known[id(packed)] = packed, packed.dense()
        weight = known[id(packed)][1]
        bias = None if packed.bias is None else packed.bias.float()
        y = F.linear((round_groups(x) if rounds else x).float(), weight, bias).to(x.dtype)
        return y if residual is None else y.add_(residual)

    product.reads_blocks = True  # type: ignore[attr-defined]  # else the engine would load numbers for it
    return table.replace(
        source="stand-in",
        embedding=stock.embedding_wide,  # float32 at few rows, as stock's is: what the noise floor comes from
        linear=product,
        logits_head=stock.logits_head_of(product),
        gated_linear=composite.gated_linear,
    )


def rounding(table: OpTable) -> OpTable:
    """``table`` with the activations of every product rounded to 8 bits first."""
    linear: Callable[..., Tensor] = table.linear
    head: Callable[..., Tensor] = table.logits_head

    def rounded_linear(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
        return linear(round_groups(x), packed, residual)

    def rounded_head(hidden: Tensor, packed: PackedLinear, softcap: float | None = None) -> Tensor:
        return head(round_groups(hidden), packed, softcap)

    return table.replace(
        source="rounded",
        linear=rounded_linear,
        logits_head=rounded_head,
        gated_linear=composite.gated_linear,  # through ``linear``
    )


def _elements(format: str) -> int:
    return BLOCK_SIZES[TYPES[format]][0]


def _pool(format: str, in_features: int, random: np.random.Generator) -> np.ndarray:
    """(_POOL, bytes of a block), each with a mean about 0."""
    elements, size = BLOCK_SIZES[TYPES[format]]
    pool = random.integers(256, size=(_POOL, size), dtype=np.uint8)
    spread = np.exp(0.3 * random.standard_normal(_POOL)) / math.sqrt(in_features)
    spread[random.random(_POOL) < _OUTLIERS] *= _LARGER
    spread[random.random(_POOL) < _ZEROS] = 0.0

    def half(values: np.ndarray) -> np.ndarray:
        return values.astype("<f2").view(np.uint8).reshape(_POOL, 2)

    if format == "bfloat16":
        return _bfloat16(random.standard_normal((_POOL, 1)) / math.sqrt(in_features))
    if format == "q8_0":
        pool[:, 2:] = random.integers(-127, 128, size=(_POOL, elements)).astype(np.int8).view(np.uint8)
        pool[:, :2] = half(spread / 73.0)
    elif format == "q4_0":
        signs = np.where(random.random(_POOL) < 0.5, 1.0, -1.0)
        pool[:, :2] = half(signs * spread / 4.6)
    elif format == "q4_1":
        step = spread / 4.6
        pool[:, :2] = half(step)
        pool[:, 2:4] = half(-7.5 * step * (0.9 + 0.2 * random.random(_POOL)))
    elif format in ("q4_k", "q5_k"):
        middle, deviation = (7.5, 4.6) if format == "q4_k" else (15.5, 9.2)
        scales = random.integers(64, size=(_POOL, 8))
        minima = np.clip(scales + random.integers(-2, 3, size=(_POOL, 8)), 0, 63)
        step = spread / (36.0 * deviation)
        pool[:, :2] = half(step)
        pool[:, 2:4] = half(middle * step)
        pool[:, 4:16] = _six_bits(scales, minima)
    else:
        assert format == "q6_k", format
        pool[:, 208:] = half(spread / (74.0 * 18.5))
    return pool


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight scales and minima of 6 bits in twelve bytes, as Q4_K and Q5_K hold them."""
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    middle = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    high = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return np.concatenate([low, middle, high], axis=1).astype(np.uint8)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(values).to(torch.bfloat16)
    return rounded.view(torch.uint8).numpy()
