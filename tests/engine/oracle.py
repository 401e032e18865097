"""Sampling by definition: one row, float64, plain Python and full sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.request import SamplingParams

Logits = NDArray[np.float64]


def processed(
    logits: Logits, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> Logits:
    """Logits after bias, min_tokens and penalties."""
    values = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos)}:
            values[token] = -math.inf
    for token in {*prompt, *output}:
        values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
    for token in set(output):
        values[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    return values


def distribution(values: Logits, params: SamplingParams) -> Logits:
    """Probabilities after temperature, min_p, top_k and top_p; ties with the last kept token are kept."""
    values = values / params.temperature
    weights = np.exp(values - values.max())
    weights[weights < params.min_p] = 0.0
    if params.top_k > 0:
        kth = np.sort(values)[::-1][min(params.top_k, len(values)) - 1]
        weights[values < kth] = 0.0
    probs = weights / weights.sum()
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        reached = int(np.searchsorted(np.cumsum(probs[order]), params.top_p))
        least = probs[order[min(reached, len(order) - 1)]]
        probs = np.where(probs < least, 0.0, probs)
    result: Logits = probs / probs.sum()
    return result


def pick(probs: Logits, uniform: float) -> int:
    """Inverse of the cumulative distribution, in order of token ids."""
    return int(np.searchsorted(np.cumsum(probs), uniform, side="right"))
