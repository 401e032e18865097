"""What a replica process is told by whoever starts it."""

from __future__ import annotations

import msgspec

from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line on standard input. ``folder`` holds the model, ``socket`` is the path to listen on."""

    replica_id: str
    model: str
    folder: str
    revision: str
    socket: str
    engine: EngineConfig

    @classmethod
    def decode(cls, line: bytes) -> ReplicaSpec:
        """Raises UsageError when the line is something else."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"standard input must hold one JSON line that describes the replica: {error}"
            ) from error
