"""How long one engine step takes: a linear model of what the step computes, and its fit.

seconds = base + per_decode · sequences that decode
               + per_prefill · prompt tokens computed
               + per_context · tokens of context that decodes read
               + per_pair    · query-key pairs of the prompts' attention
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.engine.schedule import Schedule


class StepWork(NamedTuple):
    """What one step computes, in the model's terms."""

    num_decodes: int
    num_prefill_tokens: int
    num_context_tokens: int
    num_pairs: int

    @classmethod
    def of(cls, schedule: Schedule) -> StepWork:
        """``num_pairs`` counts causal pairs: a chunk of n tokens after m others has n·m + n·(n+1)/2."""
        decodes = schedule.num_decodes
        context = prefill = pairs = 0
        for sequence, count, _ in schedule.entries[:decodes]:
            context += sequence.num_computed_tokens + count
        for sequence, count, _ in schedule.entries[decodes:]:
            prefill += count
            pairs += count * sequence.num_computed_tokens + count * (count + 1) // 2
        return cls(decodes, prefill, context, pairs)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients in seconds. ``noise`` is the relative standard deviation of a step's time."""

    base: float
    per_decode: float = 0.0
    per_prefill: float = 0.0
    per_context: float = 0.0
    per_pair: float = 0.0
    noise: float = 0.0

    def seconds(self, work: StepWork, rng: random.Random | None = None) -> float:
        """With ``rng``, noise is drawn: a factor around 1 that stays above one half."""
        mean = (
            self.base
            + self.per_decode * work.num_decodes
            + self.per_prefill * work.num_prefill_tokens
            + self.per_context * work.num_context_tokens
            + self.per_pair * work.num_pairs
        )
        if rng is None or not self.noise:
            return mean
        return mean * max(0.5, rng.gauss(1.0, self.noise))


# An 8B decoder of Llama 3's shape (32 layers, hidden 4096, 8 key/value heads of 128) in bf16 on one A100
# with 80 GB: data-sheet rates times the share of them that public sweeps of vLLM reach.
#   2.04 TB/s at 77 % (johnmusgrave.com/p/vllm-throughput-latency-sweep-on: 75 tokens/s at one stream):
#   16.1 GB of weights in 10.2 ms, 128 KiB of keys and values for each token of context in 83 ns.
#   312 TFLOP/s at 55 % for matrices (16.1 GFLOP a token) and 40 % for attention (0.52 MFLOP a pair).
#   40 µs a sequence for sampling and bookkeeping; 5 % noise.
A100_8B = StepTime(
    base=10.2e-3, per_decode=40e-6, per_prefill=94e-6, per_context=83e-9, per_pair=4.2e-9, noise=0.05
)


def fit(steps: Sequence[tuple[StepWork, float]]) -> StepTime:
    """Least squares of relative errors over measured steps (what was computed, seconds).

    Terms that no step has, or that come out negative, are 0; ``noise`` is the residual's relative
    standard deviation. Fewer steps than coefficients cannot be fitted: ValueError.
    """
    names = ("base", "per_decode", "per_prefill", "per_context", "per_pair")
    seconds = np.array([taken for _, taken in steps])
    if len(steps) < len(names) or not (seconds > 0).all():
        raise ValueError(f"at least {len(names)} steps of positive duration are needed, got {len(steps)}")
    terms = np.array([[1.0, *work] for work, _ in steps])
    relative = terms / seconds[:, None]
    kept = [column for column in range(len(names)) if terms[:, column].any()]
    while True:
        scale = np.abs(relative[:, kept]).max(axis=0)
        solution, *_ = np.linalg.lstsq(relative[:, kept] / scale, np.ones(len(steps)), rcond=None)
        solution /= scale
        if (solution >= 0).all():
            break
        del kept[int(np.argmin(solution * scale))]
    noise = float(np.std(relative[:, kept] @ solution - 1.0))
    found = {names[column]: float(value) for column, value in zip(kept, solution, strict=True)}
    return StepTime(base=found.pop("base", 0.0), noise=noise, **found)
