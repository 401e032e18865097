"""Server-sent events, read as they arrive (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLargeError(Exception):
    """One event is larger than any answer should be."""


class SSEReader:
    """Turns pieces of a stream into the data of its events; comments, names and ids are dropped."""

    __slots__ = ("_data", "_num_bytes", "_rest")

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of a line that is not complete
        self._data: list[bytes] = []
        self._num_bytes = 0  # of both

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ``piece`` completes; EventTooLargeError for a boundless one."""
        events: list[bytes] = []
        data = self._data
        rest = self._rest
        start = 0
        if rest and b"\n" in piece:
            piece = b"".join([*rest, piece])
            rest.clear()
            self._num_bytes = sum(map(len, data))
        while (end := piece.find(b"\n", start)) >= 0:
            line = piece[start : end - 1 if end > start and piece[end - 1] == 13 else end]
            start = end + 1
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._num_bytes += len(line)
            elif not line and data:
                events.append(data[0] if len(data) == 1 else b"\n".join(data))
                data.clear()
                self._num_bytes = 0
        if start < len(piece):
            rest.append(piece[start:])
            self._num_bytes += len(piece) - start
        if self._num_bytes > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events
