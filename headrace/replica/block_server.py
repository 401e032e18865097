"""The replica's door for others that fetch blocks.

receiver ◄──► connector's server (its thread) ──► door ──► engine's Prefiller ──► wake the loop
                                                   └── closed while the replica drains: it says so
"""

from __future__ import annotations

from headrace.engine.engine import Engine
from headrace.kvcache.connector import ConnectorServer, SendHandler, SendJob, SendStream


class BlockServer:
    """Listens where ``listen`` says, from here to ``close``. Raises UsageError if it cannot."""

    def __init__(self, listen: str, engine: Engine) -> None:
        self._door = _Door(engine.prefiller)
        self._server = ConnectorServer(
            listen,
            self._door,
            root=engine.root,
            kv_format=engine.kv_format,
            block_bytes=engine.kv_block_bytes,
        )

    @property
    def address(self) -> str:
        """Where receivers connect."""
        return self._server.address

    def drain(self) -> None:
        """Starts nothing new; what was started goes on. Receivers compute the rest themselves."""
        self._door.closed = True

    def close(self) -> None:
        """Ends what still runs."""
        self._server.close()


class _Door:
    """Called from the server's thread."""

    def __init__(self, handler: SendHandler) -> None:
        self.closed = False
        self._handler = handler

    def start(self, job: SendJob, stream: SendStream) -> None:
        if self.closed:
            stream.end("the replica is draining and starts no new prompts")
        else:
            self._handler.start(job, stream)

    def room(self, key: str) -> None:
        self._handler.room(key)

    def cancel(self, key: str) -> None:
        self._handler.cancel(key)
