"""Rotary position embeddings: frequencies of every kind, and a step's cos and sin.

Dynamic scaling (NTK-aware; Transformers' ``dynamic``) makes the base depend on the sequence's length.
Transformers takes the length of whatever it computes in one forward pass, so keys in its cache keep the
base they were made with. Here a token at position p always uses the base of length p + 1: the same as
Transformers' for every prompt of up to ``max_position_embeddings`` tokens and every token decoded after
it, and independent of how a prompt is chunked, batched or found in the prefix cache. Only a prompt that is
itself longer than that differs from one uncached pass of Transformers, where no caching engine can agree.

LongRoPE has two sets of factors, chosen by the whole sequence's length: keys made with one cannot be
reused under the other. The short set is used, and the family's reader limits the length accordingly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.models.config import RopeSpec

# A table grows to a power of two, from here on: 0.1 % of what the cache takes for as many tokens.
_LEAST_POSITIONS = 1024


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """(rotary_dim / 2,) float32 angles per position; for dynamic those of an unscaled length."""
    exponents = _exponents(spec)
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.frequency_factors, dtype=torch.float32) * spec.theta**exponents)
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "yarn":
        return _yarn(spec)
    if spec.kind == "llama3":
        return _llama3(spec, frequencies)
    return frequencies


def _exponents(spec: RopeSpec) -> Tensor:
    return torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim


def _yarn(spec: RopeSpec) -> Tensor:
    """Interpolates slow frequencies, keeps fast ones (Peng et al., arXiv 2309.00071, section 3.2)."""
    dim = spec.rotary_dim

    def turns_dim(turns: float) -> float:
        """The feature that turns ``turns`` times within the pretraining length."""
        periods = spec.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(periods) / (2 * math.log(spec.theta))

    low, high = turns_dim(spec.beta_fast), turns_dim(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    periods = spec.theta ** _exponents(spec)
    return 1.0 / (spec.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Divides wavelengths beyond the pretraining length, blends those near it (Llama 3.1's release)."""
    length, low, high = spec.original_max_positions, spec.low_freq_factor, spec.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / spec.factor, frequencies)
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / spec.factor + blend * scaled
    medium = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(medium, blended, scaled)


class Rope:
    """One rotary embedding on one device: a table over positions, as long as was asked for so far."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._frequencies = inverse_frequencies(spec).to(device)
        self._exponents = _exponents(spec).to(device)
        half = torch.full((spec.rotary_dim // 2,), spec.attention_factor)
        # sin's first half is negated: ops.rope adds swapped halves
        self._signs = torch.cat((-half, half)).to(device)
        self._tables: dict[torch.dtype, Tensor] = {}  # (2, positions, 1, rotary_dim): cos, sin

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype, num_positions: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Positions (tokens,) → cos, sin (tokens, 1, rotary_dim) as ``ops.rope`` takes them.

        ``num_positions`` is above all of them; None: it is looked for.
        """
        if num_positions is None:
            num_positions = int(positions.max()) + 1 if len(positions) else 0
        table = self._tables.get(dtype)
        if table is None or table.shape[1] < num_positions:
            table = self._tables[dtype] = self._grown(table, num_positions, dtype)
        both = table.index_select(1, positions)
        return both[0], both[1]

    def _grown(self, table: Tensor | None, num_positions: int, dtype: torch.dtype) -> Tensor:
        known = 0 if table is None else table.shape[1]
        length = max(_LEAST_POSITIONS, 1 << (num_positions - 1).bit_length())
        more = torch.stack(self._compute(torch.arange(known, length, device=self._device), dtype))
        return more if table is None else torch.cat((table, more), dim=1)

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies = self._dynamic(positions) if self.spec.kind == "dynamic" else self._frequencies
        half = positions.to(torch.float32)[:, None] * frequencies
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        cos = angles.cos()
        if self.spec.attention_factor != 1.0:
            cos *= self.spec.attention_factor
        return cos.to(dtype), (angles.sin() * self._signs).to(dtype)

    def _dynamic(self, positions: Tensor) -> Tensor:
        """(tokens, rotary_dim / 2): each position's frequencies at the length that ends with it."""
        spec = self.spec
        lengths = (positions + 1).clamp(min=spec.max_positions).to(torch.float64)
        growth = spec.factor * lengths / spec.max_positions - (spec.factor - 1)
        bases = spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))
        return 1.0 / bases.to(torch.float32)[:, None] ** self._exponents
