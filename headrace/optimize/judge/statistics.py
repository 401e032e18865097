"""How many times faster, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.optimize.records import Ratio

_RESAMPLES = 2000


def ratio(baseline: Sequence[float], candidate: Sequence[float], calls: int = 1) -> Ratio:
    """Of interleaved pairs in seconds, ``calls`` calls each: the median of baseline / candidate with its
    bootstrapped 95 % interval; the times of one call are medians too."""
    first, second = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    pairs = first / second
    random = np.random.default_rng(0)  # the interval is a function of the pairs
    resampled = np.median(random.choice(pairs, size=(_RESAMPLES, len(pairs))), axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Ratio(
        median=float(np.median(pairs)),
        low=float(low),
        high=float(high),
        pairs=len(pairs),
        baseline_s=float(np.median(first)) / calls,
        candidate_s=float(np.median(second)) / calls,
    )
