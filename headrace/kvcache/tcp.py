"""Blocks between hosts: a block's bytes follow its message in the stream."""

from __future__ import annotations

import contextlib
import socket

from headrace.core.errors import UsageError
from headrace.kvcache.channel import BACKLOG, Channel, encode_frame
from headrace.kvcache.transfer import Block, ToReceiver, ToSender

_AHEAD_BYTES = 1024 * 1024  # handed to the socket's queue before a block must wait


def _prepare(sock: socket.socket) -> None:
    """No waiting for more to send, and a peer whose host is gone is noticed within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises UsageError."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot serve blocks on {host}:{port}: {error.strerror or error}",
            hint="choose an address of this host and a free port",
            param="kv_connector",
        ) from error
    return sock


class TcpSender(Channel):
    """The side that has the blocks."""

    def __init__(self, sock: socket.socket, block_bytes: int) -> None:
        super().__init__(sock, ToSender, block_bytes)
        _prepare(sock)

    def _place(self, head: Block, payload: bytes | bytearray) -> bool:
        if self._out_bytes > _AHEAD_BYTES:
            return False
        self._put(encode_frame(head))
        self._put(payload)
        return True

    def freed(self, num_slots: int) -> None:
        """There are no slots; a receiver that speaks of some is confused, and is not believed."""


class TcpReceiver(Channel):
    """The side that wants them."""

    def __init__(self, sock: socket.socket, block_bytes: int) -> None:
        super().__init__(sock, ToReceiver, block_bytes)
        _prepare(sock)

    def _take(self, head: Block) -> None:
        return None
