"""Server-sent events, read as they arrive (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLargeError(Exception):
    """One event is larger than any answer should be."""


class SSEReader:
    """Turns pieces of a stream into the data of its events; comments, names and ids are dropped."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ``piece`` completes; EventTooLargeError for a boundless one."""
        buffer = self._rest + piece if self._rest else piece
        events: list[bytes] = []
        data = self._data
        start = 0
        while (end := buffer.find(b"\n", start)) >= 0:
            line = buffer[start : end - 1 if end > start and buffer[end - 1] == 13 else end]
            start = end + 1
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and data:
                events.append(data[0] if len(data) == 1 else b"\n".join(data))
                data.clear()
        self._rest = buffer[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events
