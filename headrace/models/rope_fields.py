"""Reads a rotary embedding from a configuration, from ``rope_parameters`` or the older ``rope_scaling``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import UnsupportedModelError
from headrace.models.config import RopeSpec
from headrace.models.fields import Fields

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Transformers accepts the pretraining length here for every type, and uses it for three of them.
_LENGTH = {"original_max_position_embeddings"}
_KEYS: dict[str, set[str]] = {
    "default": _LENGTH,
    "linear": {"factor"} | _LENGTH,
    "dynamic": {"factor"} | _LENGTH,
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | _LENGTH,
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"} | _LENGTH,
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"} | _LENGTH,
}


def read_rope(
    params: Mapping[str, Any],
    *,
    theta: float,
    head_dim: int,
    max_positions: int,
    original_max_positions: int | None = None,
    partial_rotary_factor: float = 1.0,
    may_be_partial: bool = False,
    where: str = "config.json: rope_parameters",
) -> RopeSpec:
    """The rotary embedding that ``params`` describe; ``theta`` is the base when they name none.

    ``original_max_positions`` is the configuration's own field, which goes before the one in ``params``.
    Raises UnsupportedModelError for a type or a key that is not known here: each of them changes
    numbers.
    """
    fields = Fields(params, where)
    kind = fields.text("rope_type") or fields.text("type") or "default"
    if kind not in _KEYS:
        raise UnsupportedModelError(
            f"{where}: rope type {kind!r} is not supported; {', '.join(sorted(_KEYS))} are"
        )
    unknown = sorted(name for name in set(params) - _COMMON - _KEYS[kind] if params[name] is not None)
    if unknown:
        raise UnsupportedModelError(f"{where}: {', '.join(unknown)} not supported with rope type {kind!r}")

    partial = fields.positive("partial_rotary_factor", partial_rotary_factor)
    if partial != 1.0 and not may_be_partial:
        raise UnsupportedModelError(f"{where}: partial_rotary_factor {partial:g} in a family without it")
    rotary_dim = int(head_dim * partial)
    if partial > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(
            f"{where}: {rotary_dim} rotated features of a head of {head_dim}; an even number up to "
            f"{head_dim} is needed"
        )
    base = fields.positive("rope_theta", theta)
    if kind == "default":
        return RopeSpec("default", base, rotary_dim)

    stated = fields.optional_integer("original_max_position_embeddings")
    original = original_max_positions or stated or max_positions
    # 0 is refused by ``positive``: these types mean nothing without a factor
    factor = fields.positive("factor", max_positions / original if kind in ("yarn", "longrope") else 0.0)
    if kind == "linear":
        return RopeSpec("linear", base, rotary_dim, factor)
    if kind == "dynamic":
        if rotary_dim < 4:
            raise UnsupportedModelError(f"{where}: dynamic scaling needs at least 4 rotated features")
        return RopeSpec("dynamic", base, rotary_dim, factor, max_positions=max_positions)
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor", 0.0), fields.positive("high_freq_factor", 0.0)
        if low == high:
            raise fields.wrong("high_freq_factor", "different from low_freq_factor")
        return RopeSpec(
            "llama3",
            base,
            rotary_dim,
            factor,
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        return RopeSpec(
            "yarn",
            base,
            rotary_dim,
            factor,
            original_max_positions=original,
            attention_factor=_yarn_attention_factor(fields, factor),
            beta_fast=fields.number("beta_fast", 0.0) or 32.0,
            beta_slow=fields.number("beta_slow", 0.0) or 1.0,
            truncate=fields.flag("truncate", True),
        )
    factors = fields.numbers("short_factor")
    if len(factors) != rotary_dim // 2 or min(factors) <= 0:
        raise fields.wrong("short_factor", f"{rotary_dim // 2} numbers above 0")
    attention_factor = fields.optional_number("attention_factor")
    if attention_factor is None:
        # Ding et al., LongRoPE, arXiv 2402.13753
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSpec(
        "longrope",
        base,
        rotary_dim,
        factor,
        original_max_positions=original,
        attention_factor=attention_factor,
        frequency_factors=factors,
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """Peng et al., YaRN, arXiv 2309.00071, with DeepSeek's two-sided variant."""
    stated = fields.optional_number("attention_factor")
    if stated is not None:
        return stated
    mscale, mscale_all = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all:
        return scale(mscale) / scale(mscale_all)
    return scale(1.0)
