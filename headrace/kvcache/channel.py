"""One connection of a connector: messages both ways, and blocks one way.

A frame is a 4-byte little-endian length and a msgpack message. How a block's bytes travel is the transport's
affair: a subclass says how they are placed, and how they are taken.

    send, send_block ─► waiting (in order) ─► placed when the transport has room ─► out ─► socket
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import Any

import msgspec

from headrace.core.errors import UsageError
from headrace.kvcache.transfer import Block

MAX_FRAME_BYTES = 64 * 1024 * 1024  # a Fetch carries a prompt's tokens, 4 bytes each
BACKLOG = 128
_RECEIVE_BYTES = 64 * 1024
_RECEIVES_A_TURN = 8  # so that one connection does not keep the others waiting
_BUFFERS_A_WRITE = 32
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class ConnectionLost(Exception):
    """The peer is gone or talks nonsense; says which. The connection is beyond repair."""


class Channel:
    """Works on one thread only, and never blocks. ``messages`` is the union of what the peer may send;
    ``block_bytes`` the size of every block."""

    def __init__(self, sock: socket.socket, messages: Any, block_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.block_bytes = block_bytes
        self.num_waiting_blocks = 0
        self.lost: ConnectionLost | None = None
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages)
        self._waiting: deque[tuple[Any, bytes | bytearray | None]] = deque()
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._in = bytearray()
        self._head: Block | None = None  # its payload follows in the stream
        self._payload = bytearray()
        self._filled = 0

    # Out

    def send(self, message: Any) -> None:
        """Queues a message behind the blocks that wait."""
        self._waiting.append((message, None))

    def send_now(self, message: Any) -> None:
        """Queues a message before the blocks that wait."""
        self._put(encode_frame(message))

    def send_block(self, head: Block, payload: bytes | bytearray) -> None:
        """Queues a block; ``payload`` must not change any more."""
        self._waiting.append((head, payload))
        self.num_waiting_blocks += 1

    def flush(self) -> bool:
        """Writes what can be written now; whether anything was. Raises ConnectionLost."""
        progress = False
        while self._move_waiting() or self._out:
            try:
                count = self.sock.sendmsg(
                    [self._out[i] for i in range(min(len(self._out), _BUFFERS_A_WRITE))]
                )
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror or error}") from error
            progress = True
            self._out_bytes -= count
            while count:
                first = self._out[0]
                if count < len(first):
                    self._out[0] = first[count:]
                    break
                count -= len(self._out.popleft())
        return progress

    @property
    def wants_to_write(self) -> bool:
        """Whether the socket has to take more before anything moves."""
        return bool(self._out)

    @property
    def has_unsent(self) -> bool:
        """Whether anything waits for the peer: for the socket, or for room that the peer gives."""
        return bool(self._out or self._waiting)

    # In

    def receive(self) -> list[tuple[Any, bytearray | None]]:
        """What has arrived: messages, and with a Block its payload. ``lost`` is set where no more can."""
        arrived: list[tuple[Any, bytearray | None]] = []
        try:
            for _ in range(_RECEIVES_A_TURN):
                if not self._receive_once():
                    raise ConnectionLost("the peer closed the connection")
                self._parse(arrived)
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionLost as error:
            self.lost = error
        except OSError as error:
            self.lost = ConnectionLost(f"the connection broke: {error.strerror or error}")
        return arrived

    def close(self) -> None:
        """Lets go of the socket and of whatever the transport holds."""
        self._waiting.clear()
        self._out.clear()
        self.num_waiting_blocks = 0
        self.sock.close()

    # What a transport says

    def _place(self, head: Block, payload: bytes | bytearray) -> bool:
        """Starts a block on its way with ``_put``; False while there is no room."""
        raise AssertionError("a channel that sends blocks has a transport")

    def _take(self, head: Block) -> bytearray | None:
        """A block's bytes; None when they follow its head in the stream. Raises ConnectionLost."""
        raise AssertionError("a channel that receives blocks has a transport")

    def _receive_some(self) -> bytes:
        return self.sock.recv(_RECEIVE_BYTES)

    def _receive_once(self) -> int:
        """Bytes received: straight into a payload where one is expected."""
        if self._head is None:
            data = self._receive_some()
            self._in += data
            return len(data)
        with memoryview(self._payload) as view, view[self._filled :] as rest:
            count = self.sock.recv_into(rest)
        self._filled += count
        return count

    def _put(self, data: bytes | bytearray) -> None:
        self._out.append(memoryview(data))
        self._out_bytes += len(data)

    def _move_waiting(self) -> bool:
        """Whether anything is ready for the socket afterwards."""
        while self._waiting:
            message, payload = self._waiting[0]
            if payload is None:
                self._put(encode_frame(message))
            elif self._place(message, payload):
                self.num_waiting_blocks -= 1
            else:
                break
            self._waiting.popleft()
        return bool(self._out)

    def _parse(self, arrived: list[tuple[Any, bytearray | None]]) -> None:
        data, offset = self._in, 0
        while True:
            if self._head is not None:
                count = min(len(data) - offset, len(self._payload) - self._filled)
                self._payload[self._filled : self._filled + count] = data[offset : offset + count]
                self._filled += count
                offset += count
                if self._filled < len(self._payload):
                    break
                arrived.append((self._head, self._payload))
                self._head, self._payload, self._filled = None, bytearray(), 0
            if len(data) - offset < _LENGTH.size:
                break
            (length,) = _LENGTH.unpack_from(data, offset)
            if length > MAX_FRAME_BYTES:
                raise ConnectionLost(f"the peer sent no message of ours: a frame of {length} bytes")
            end = offset + _LENGTH.size + length
            if len(data) < end:
                break
            try:
                with memoryview(data) as view, view[offset + _LENGTH.size : end] as body:
                    message = self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise ConnectionLost(f"the peer sent no message of ours: {error}") from error
            offset = end
            self._arrive(message, arrived)
        del data[:offset]

    def _arrive(self, message: Any, arrived: list[tuple[Any, bytearray | None]]) -> None:
        if type(message) is not Block:
            arrived.append((message, None))
            return
        if message.length != self.block_bytes:
            raise ConnectionLost(f"the peer sent a block of {message.length} bytes, not {self.block_bytes}")
        payload = self._take(message)
        if payload is not None:
            arrived.append((message, payload))
        else:
            self._head, self._payload, self._filled = message, bytearray(message.length), 0


def encode_frame(message: Any) -> bytes:
    """One message, ready to be written."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def parse_address(address: str) -> str | tuple[str, int]:
    """A Unix socket's path, or host and port. Raises UsageError."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return rest
    if kind == "tcp" and rest.startswith("//"):
        host, _, port = rest[2:].rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if host and port.isascii() and port.isdigit() and int(port) < 2**16:
            return host, int(port)
    raise UsageError(
        f"{address!r} is no address of a connector",
        hint="unix:/path (shared memory on one host) or tcp://host:port",
        param="kv_connector",
    )
