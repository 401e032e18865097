"""The environment that an engine runs best in."""

from __future__ import annotations

import os
import sys

# What an engine's process is started with, unless the user set it otherwise.
#   GLIBC_TUNABLES, THP_MEM_ALLOC_ENABLE   weights in pages of 2 MiB, from malloc and from torch's own
#       allocator: read a tenth to a fifth faster where the system grants huge pages on request only
#   GOMP_SPINCOUNT   threads spin for about 100 µs at a barrier, then sleep. libgomp's default spins for
#       milliseconds, so that a busy neighbour stalls every step; sleeping sooner costs quiet cores a fifth
ENGINE_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "GOMP_SPINCOUNT": "5000",
}


def engine_environment() -> dict[str, str]:
    """This process's environment with ENGINE_ENVIRONMENT under it; a wait policy of the user's stands."""
    defaults = dict(ENGINE_ENVIRONMENT)
    if "OMP_WAIT_POLICY" in os.environ:
        del defaults["GOMP_SPINCOUNT"]
    return defaults | os.environ


def adopt_engine_environment() -> None:
    """For an engine in this process, as far as that still goes: before torch and with it libgomp are
    loaded, which read it then. Huge pages for malloc are the one thing that comes too late."""
    if "torch" not in sys.modules:
        os.environ.update(engine_environment())
