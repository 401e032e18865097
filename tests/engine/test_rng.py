"""The counter-based generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.rng import UniformStream, uniforms


def test_is_philox_4x64_10() -> None:
    """Counter 0, key 0: the known answers published with Random123."""
    words = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert uniforms(0, 0, 0, 4).tolist() == [(word >> 11) * 2.0**-53 for word in words]


def test_a_position_does_not_depend_on_where_reading_starts() -> None:
    whole = uniforms(7, 3, 0, 200)
    for start in (0, 1, 2, 3, 4, 63, 64, 131):
        assert uniforms(7, 3, start, 9).tolist() == whole[start : start + 9].tolist()
    stream = UniformStream(7, 3)
    for position in (0, 1, 64, 5, 199, 198, 63):
        assert stream.at(position) == whole[position]


def test_seeds_and_samples_are_different_streams() -> None:
    keys = [(seed, sample) for seed in (0, 1, -1, 2**63 - 1, -(2**63)) for sample in (0, 1, 127)]
    streams = {tuple(uniforms(seed, sample, 0, 8)) for seed, sample in keys}
    assert len(streams) == len(keys)


def test_is_uniform_and_uncorrelated() -> None:
    numbers = uniforms(11, 0, 0, 100_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert _kolmogorov(numbers) < KOLMOGOROV_1_PERCENT
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    across_seeds = np.array([uniforms(seed, 0, 5, 1)[0] for seed in range(5000)])
    assert _kolmogorov(across_seeds) < KOLMOGOROV_1_PERCENT


KOLMOGOROV_1_PERCENT = 1.628  # quantile of sqrt(n) times the largest distance


def _kolmogorov(numbers: NDArray[np.float64]) -> float:
    """sqrt(n) times the largest distance to the uniform distribution."""
    n = len(numbers)
    return float(np.abs(np.sort(numbers) - (np.arange(n) + 0.5) / n).max() * n**0.5)
