"""How far an output is from the truth, and how far it may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOOR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-4}
"""The least limit for a slot of this dtype: other orders of summing, other ways to compute exp."""
STOCK_FACTOR = 4.0
"""A candidate may be off by so many times what the stock operators are. Where a product, or a key on its way
into the cache, is rounded to 8 bits, the same operations in another order alone are off by up to three times
as much on heavy-tailed inputs."""


def error(found: Tensor, truth: Tensor) -> float:
    """The worst row's largest difference over the row's root mean square; inf where not finite.

    A row's scale is at least a thousandth of the whole tensor's, so that a zero row can be compared.
    """
    if truth.numel() == 0:
        return 0.0
    wide, true = found.double(), truth.double()
    if not bool(torch.isfinite(wide).all()):
        return math.inf
    scale = true.square().mean(dim=-1).sqrt()
    overall = float(true.square().mean().sqrt())
    scale = scale.clamp_min(max(1e-3 * overall, 1e-30))
    return float(((wide - true).abs().amax(dim=-1) / scale).max())


def limit(stock_error: float, dtype: torch.dtype) -> float:
    """The largest error allowed at stock's own error."""
    floor = FLOOR.get(dtype, 0.0)
    return floor if not math.isfinite(stock_error) else max(STOCK_FACTOR * stock_error, floor)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Bitwise, so that NaN equals itself."""
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
