"""Where an op stands under the roofs: time at the roof, what bounds it, what could be recovered.

attainable = min(intensity * stream rate, product rate)     (Williams et al., CACM 52(4), 2009)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.optimize.records import BoundClass, OpProfile, Roofs

# An op that takes so much longer than both roofs allow is held up by neither of them.
_OVERHEAD_SHARE = 0.1
_FALLBACK_DTYPE = "float32"
_NONE: Mapping[str, float] = MappingProxyType({})


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


def ceilings(
    roofs: Roofs, footprint: float, dtype: str, flops: float = 0.0, products: Mapping[str, float] = _NONE
) -> Ceilings:
    """Those of an op with such a footprint: the stream rate of the nearest that was measured. Of ``flops``
    the ``products`` are in the dtypes that they name, the rest in ``dtype``: together they have one rate."""
    nearest = min(roofs.stream, key=lambda size: abs(math.log(size / max(footprint, 1.0))), default=None)
    stream = math.inf if nearest is None else roofs.stream[nearest]
    if not flops:
        return Ceilings(stream, _rate(roofs, dtype))
    seconds = sum(part / _rate(roofs, kind) for kind, part in products.items())
    seconds += max(0.0, flops - sum(products.values())) / _rate(roofs, dtype)
    return Ceilings(stream, flops / seconds if seconds else math.inf)


def _rate(roofs: Roofs, dtype: str) -> float:
    """Of products in ``dtype``. Bytes have no stand-in: where they were not measured they have no roof."""
    return roofs.gemm.get(dtype) or (dtype != "int8" and roofs.gemm.get(_FALLBACK_DTYPE)) or math.inf


def is_kernel(op: OpProfile) -> bool:
    """Whether it is work that a kernel does, rather than a part of the engine around them."""
    return bool(op.shapes)


def depth(op: OpProfile) -> int:
    return op.path.count("/")
