"""Where an op stands under the roofs: time at the roof, what bounds it, what could be recovered.

attainable = min(intensity * stream rate, product rate)     (Williams et al., CACM 52(4), 2009)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.optimize.records import BoundClass, OpProfile, Roofs

# An op that takes so much longer than both roofs allow is held up by neither of them.
_OVERHEAD_SHARE = 0.1
_FALLBACK_DTYPE = "float32"


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations per second that bound one op; infinite where a roof was not measured."""

    stream: float
    gemm: float

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time."""
        return max(nbytes / self.stream, flops / self.gemm)

    def bound(self, flops: float, nbytes: float, spent_s: float) -> BoundClass:
        least = self.seconds(flops, nbytes)
        if least < _OVERHEAD_SHARE * spent_s:
            return "overhead"
        return "compute" if flops / self.gemm > nbytes / self.stream else "memory"


def ceilings(roofs: Roofs, footprint: float, dtype: str) -> Ceilings:
    """Those of an op with such a footprint: the stream rate of the nearest that was measured."""
    nearest = min(roofs.stream, key=lambda size: abs(math.log(size / max(footprint, 1.0))), default=None)
    gemm = roofs.gemm.get(dtype) or roofs.gemm.get(_FALLBACK_DTYPE) or math.inf
    return Ceilings(math.inf if nearest is None else roofs.stream[nearest], gemm)


def attainable(roofs: Roofs, footprint: float, dtype: str, intensity: float) -> float:
    """FLOP per second that the roofs allow at an intensity."""
    found = ceilings(roofs, footprint, dtype)
    return min(intensity * found.stream, found.gemm)


def is_kernel(op: OpProfile) -> bool:
    """Whether it is work that a kernel does, rather than a part of the engine around them."""
    return bool(op.shapes)


def depth(op: OpProfile) -> int:
    return op.path.count("/")
