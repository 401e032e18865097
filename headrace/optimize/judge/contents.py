"""What tensors are filled with: several kinds, because a kernel can be right on Gaussians alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_POOL = 1 << 20


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & (2**63 - 1))


def fill_activation(tensor: Tensor, content: str, seed: int) -> None:
    """In place. ``content`` is one of ``problem.CONTENTS``; rows are the first dimension."""
    if tensor.numel() == 0:
        return
    random = generator(seed)
    rows = torch.randn(tensor.shape, generator=random)
    if content == "heavy":
        columns = torch.randn(tensor.shape[-1:], generator=random)
        rows *= torch.exp(1.2 * columns)
        rows[..., torch.randint(tensor.shape[-1], (3,), generator=random)] *= 30.0
    elif content == "large":
        rows *= 50.0
    elif content == "structured":
        _structure(rows, random)
    tensor.copy_(rows)


def _structure(rows: Tensor, random: torch.Generator) -> None:
    """Rows in turn: constant, zero, one-hot, alternating, rising; and one that stays as it was."""
    width = rows.shape[-1]
    first = int(torch.randint(6, (1,), generator=random))
    for index in range(rows.shape[0]):
        kind, row = (first + index) % 6, rows[index]
        if kind == 0:
            row.fill_(0.75)
        elif kind == 1:
            row.zero_()
        elif kind == 2:
            hot = int(torch.randint(width, (1,), generator=random))
            row.zero_()
            row[..., hot] = 4.0
        elif kind == 3:
            row.fill_(1.0)
            row[..., ::2] = -1.0
        elif kind == 4:
            row.copy_(torch.linspace(-2.0, 2.0, width).expand_as(row))


def fill_weight(tensor: Tensor, seed: int) -> None:
    """In place: near-Gaussian, scaled so that a product keeps its input's size, some columns larger.

    One pool of random numbers from a place that the seed chooses, so that hundreds of megabytes take no time.
    """
    random = generator(seed)
    count = tensor.numel()
    pool = torch.randn(min(_POOL, count + 4096), generator=random)
    pool *= 1.0 + (torch.rand(pool.shape, generator=random) < 0.002) * 4.0
    pool = (pool / math.sqrt(tensor.shape[-1])).to(tensor.dtype)
    flat, done = tensor.view(-1), 0
    while done < count:
        start = int(torch.randint(max(1, len(pool) // 2), (1,), generator=random))
        part = pool[start : start + count - done]
        flat[done : done + len(part)] = part
        done += len(part)


def nudge_weight(tensor: Tensor, seed: int) -> None:
    """Changes two elements of every row, as ``nudge_rows``, by a weight's own measure."""
    random = generator(seed)
    width = tensor.shape[-1]
    places = torch.randint(width // 4, max(width // 4 + 1, 3 * width // 4), (2,), generator=random)
    change = (3.0 + torch.rand(tensor[..., places].shape, generator=random)) / math.sqrt(width)
    tensor[..., places] = (tensor[..., places].float() + change).to(tensor.dtype)


def fill_gain(tensor: Tensor, offset: float, seed: int) -> None:
    """A norm's weights, around 1 less their offset."""
    tensor.copy_(1.0 - offset + 0.2 * torch.randn(tensor.shape, generator=generator(seed)))


def fill_angles(cos: Tensor, sin: Tensor, positions: Tensor, theta: float = 10000.0) -> None:
    """(tokens, 1, r) as the decoder makes them: each angle twice, the first half of ``sin`` negated."""
    half = cos.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * frequencies
    cos.copy_(torch.cat((angles.cos(), angles.cos()), dim=-1))
    sin.copy_(torch.cat((-angles.sin(), angles.sin()), dim=-1))


def nudge_rows(tensor: Tensor, seed: int) -> None:
    """Changes two elements of every row, away from its ends: what a hash of a sample would not see."""
    if tensor.numel() == 0:
        return
    random = generator(seed)
    width = tensor.shape[-1]
    places = torch.randint(width // 4, max(width // 4 + 1, 3 * width // 4), (2,), generator=random)
    change = 3.0 + torch.rand(tensor[..., places].shape, generator=random)
    tensor[..., places] = (tensor[..., places].float() + change).to(tensor.dtype)
