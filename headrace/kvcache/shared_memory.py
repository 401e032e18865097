"""Blocks between processes of one host: copied into memory that both have mapped, named by their messages.

    sender                         memfd, sealed: neither side can change its size
    block ─► slot n % num_slots   │ slot 0 │ slot 1 │ … │    Block(slot) ─► copied out ─► Freed(1)

The memory has no name: its descriptor is passed over the Unix socket, so that nothing is left once both
processes are gone, however they went.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
from pathlib import Path
from typing import Any

from headrace.core.errors import UsageError
from headrace.core.process import bind_unix
from headrace.kvcache.channel import BACKLOG, Channel, ConnectionLost, encode_frame
from headrace.kvcache.transfer import Block, Freed, Ring, ToReceiver, ToSender

RING_BYTES = 16 * 1024 * 1024
_MIN_SLOTS, _MAX_SLOTS = 2, 256
_FD_SPACE = socket.CMSG_SPACE(4 * 4)


def listen_unix(path: Path) -> socket.socket:
    """A listening socket that only its owner can reach. Raises UsageError, also where the system has no
    anonymous files to share."""
    if not hasattr(os, "memfd_create"):
        raise UsageError(
            "shared memory between replicas needs Linux (memfd_create)",
            hint="use --kv-connector tcp",
            param="kv_connector",
        )
    try:
        sock = bind_unix(path)
    except OSError as error:
        raise UsageError(
            f"cannot serve blocks on {path}: {error.strerror or error}", hint="use a writable path"
        ) from error
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


class SharedSender(Channel):
    """The side that has the blocks; it makes the memory. Raises OSError when there is none to be had."""

    def __init__(self, sock: socket.socket, block_bytes: int) -> None:
        super().__init__(sock, ToSender, block_bytes)
        self._slot_bytes = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._num_slots = min(_MAX_SLOTS, max(_MIN_SLOTS, RING_BYTES // self._slot_bytes))
        self._num_placed = 0
        self._num_freed = 0
        size = self._num_slots * self._slot_bytes
        fd = os.memfd_create("headrace-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(fd, size)
            # The socket is new, so this small message fits.
            socket.send_fds(sock, [encode_frame(Ring(self._num_slots, self._slot_bytes))], [fd])
        finally:
            os.close(fd)

    def close(self) -> None:
        super().close()
        self._memory.close()

    def freed(self, num_slots: int) -> None:
        """The receiver has copied so many more out. Raises ConnectionLost if there were not so many."""
        if not 0 < num_slots <= self._num_placed - self._num_freed:
            raise ConnectionLost(f"the peer freed {num_slots} slots that it did not have")
        self._num_freed += num_slots

    def _place(self, head: Block, payload: bytes | bytearray) -> bool:
        if self._num_placed - self._num_freed == self._num_slots:
            return False
        slot = self._num_placed % self._num_slots
        start = slot * self._slot_bytes
        self._memory[start : start + len(payload)] = payload
        self._num_placed += 1
        self._put(
            encode_frame(Block(head.job_id, head.index, head.block_id, head.length, head.checksum, slot))
        )
        return True


class SharedReceiver(Channel):
    """The side that wants them."""

    def __init__(self, sock: socket.socket, block_bytes: int) -> None:
        super().__init__(sock, ToReceiver, block_bytes)
        self._memory: mmap.mmap | None = None
        self._ring = Ring(0, 0)
        self._fds: list[int] = []

    def _arrive(self, message: Any, arrived: list[tuple[Any, bytearray | None]]) -> None:
        if type(message) is Ring:
            self._map(message)
        else:
            super()._arrive(message, arrived)

    def _map(self, ring: Ring) -> None:
        """Maps what came with ``ring``. Raises ConnectionLost if that is not what it says."""
        size = ring.num_slots * ring.slot_bytes
        if self._memory is not None or not self._fds or ring.slot_bytes < self.block_bytes:
            raise ConnectionLost("the peer offered shared memory that cannot be used")
        fd = self._fds.pop(0)
        try:
            # Without these seals the peer could shrink it, and a read beyond its end kills the reader.
            needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed != needed or os.fstat(fd).st_size < size:
                raise ConnectionLost("the peer offered shared memory that cannot be trusted")
            self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the peer's shared memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._ring = ring

    def close(self) -> None:
        super().close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _take(self, head: Block) -> bytearray:
        if self._memory is None or not 0 <= head.slot < self._ring.num_slots:
            raise ConnectionLost(f"the peer named slot {head.slot} of {self._ring.num_slots}")
        start = head.slot * self._ring.slot_bytes
        with memoryview(self._memory) as view, view[start : start + head.length] as slot:
            payload = bytearray(slot)
        self.send_now(Freed(1))
        return payload

    def _receive_some(self) -> bytes:
        if self._memory is not None:
            return super()._receive_some()
        data, ancillary, _, _ = self.sock.recvmsg(4096, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                with contextlib.suppress(ValueError):
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        return data
