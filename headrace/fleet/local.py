"""A replica process on this machine, and the environment that an engine runs best in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.core.launch import ReplicaSpec
from headrace.fleet.child import Child

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


class LocalReplica(Child):
    """``python -m headrace.replica``, supervised."""

    def __init__(
        self,
        spec: ReplicaSpec,
        *,
        on_loading: Callable[[int, int], None] | None = None,
        on_restart: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            f"replica {spec.replica_id}",
            "headrace.replica",
            spec,
            environment=engine_environment(),
            hint="its last words are above; if it was killed by the system, memory ran out: "
            "lower --max-model-len or --kv-cache-gib",
            on_loading=on_loading,
            on_restart=on_restart,
        )
        self.spec = spec

    def start_with(self, pack: str) -> None:
        """Later processes of it are told this as ``EngineConfig.pack``."""
        engine = msgspec.structs.replace(self.spec.engine, pack=pack)
        self.spec = msgspec.structs.replace(self.spec, engine=engine)
        self.become(self.spec)

    async def stop(self, grace_s: float) -> None:
        """As for every child; a replica that is killed, or stopped as it loads, leaves its sockets behind."""
        await super().stop(grace_s)
        Path(self.spec.socket).unlink(missing_ok=True)
        scheme, _, path = self.spec.kv_listen.partition(":")
        if scheme == "unix":
            Path(path).unlink(missing_ok=True)
