"""A replica process on this machine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.core.engine_environment import engine_environment
from headrace.core.launch import ReplicaSpec
from headrace.fleet.child import Child

_CRASHES = (signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


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
            hint=_hint,
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


def _hint(code: int) -> str:
    if code == -signal.SIGKILL:
        return "if the system killed it, memory ran out: lower --max-model-len or --kv-cache-gib"
    if -code in _CRASHES:
        return "machine code crashed; --pack none starts without compiled kernels"
    return "its last words are above"
