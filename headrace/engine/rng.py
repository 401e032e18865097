"""One uniform number per sampled token, from a counter instead of a state.

The number for (seed, sample index, output position) does not depend on what else was drawn, so a seeded
stream is the same alone, in any batch, after a preemption, and after it moved to another replica.

The generator is Philox 4x64 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). The key is (seed, sample index); counter block ``b`` gives the positions ``4b .. 4b + 3``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK64 = 2**64 - 1
_MASK256 = 2**256 - 1
_LANES = 4
_AHEAD = 64


def uniforms(seed: int, sample_index: int, start: int, count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) for output positions ``start .. start + count - 1``, shape (count,)."""
    block, lane = divmod(start, _LANES)
    # numpy counts up before each block, so it starts one earlier.
    generator = np.random.Philox(
        key=(seed & _MASK64) | (sample_index & _MASK64) << 64, counter=(block - 1) & _MASK256
    )
    raw: NDArray[np.uint64] = generator.random_raw(lane + count)[lane:]
    numbers: NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


class UniformStream:
    """The numbers of one sample, fetched a few positions ahead."""

    def __init__(self, seed: int, sample_index: int) -> None:
        self._seed = seed
        self._sample_index = sample_index
        self._start = 0
        self._ahead: list[float] = []

    def at(self, position: int) -> float:
        """The number for one output position."""
        offset = position - self._start
        if not 0 <= offset < len(self._ahead):
            self._start, offset = position, 0
            self._ahead = uniforms(self._seed, self._sample_index, position, _AHEAD).tolist()
        return self._ahead[offset]
