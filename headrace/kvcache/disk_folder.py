"""The folder of the disk tier: which file holds which block, and how many bytes all of them have.

    <path>/usage                          bytes of all blocks, added, removed; its lock orders changes
    <path>/tmp/<random>                   being written, locked by its writer; unlocked: its writer is dead
    <path>/<root, 16 hex>/<xx>/<64 hex>   one block (see block_format), complete since its rename

Any number of processes share it. A change (rename to its place, removal) and its count are made under one
lock, so that ``usage`` is the sum of all blocks; where a process died between the two, ``correct`` mends it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import UsageError
from headrace.kvcache.block_format import HEADER_BYTES, BlockHeader, DamagedBlockError, check_payload

ROOT_BYTES = 8  # of the root that name its folder
# A start goes on: the disk may have room, or be there, later.
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_USAGE = struct.Struct("<qQQ")
TOUCH_S = 60.0
LOCK_WAIT_S = 3.0
_BLOCK_NAME = re.compile("[0-9a-f]{64}")
_ROOT_NAME = re.compile("[0-9a-f]{16}")
_FAN_NAME = re.compile("[0-9a-f]{2}")


@dataclass(frozen=True)
class Usage:
    """Bytes of all blocks, and bytes ever added and removed; ``known``: somebody has counted."""

    num_bytes: int
    added: int
    removed: int
    known: bool = True


@dataclass(frozen=True)
class FoundBlock:
    """A file of a scan. ``key`` is its root's first bytes and its identity; ``used`` is Unix time."""

    key: bytes
    num_bytes: int
    used: float


class DiskFolder:
    """All calls may come from any thread. Raises UsageError where ``path`` cannot be such a folder, or is
    open to others. Other trouble, now or later, is an OSError of the call that needs the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tmp = path / "tmp"
        self._lock = threading.Lock()  # file locks hold between processes, this one between threads
        self._usage_fd = -1
        self._trouble = OSError(errno.EBADF, "the folder is closed")  # why it has no ``usage``
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = path.stat()
            if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UsageError(
                    f"the folder {path} belongs to, or can be written by, other users: blocks in it could be "
                    "anybody's",
                    hint=f"chmod go-w {path}, or choose another --kv-disk-path",
                    param="kv_disk_path",
                )
            self._tmp.mkdir(mode=0o700, exist_ok=True)
            self._usage_fd = self._open_usage()
        except OSError as error:
            if error.errno in _MAY_PASS:
                self._trouble = error
                return
            raise UsageError(
                f"cannot keep blocks in {path}: {error.strerror or error}",
                hint="choose a folder that can be written with --kv-disk-path, or --kv-disk-gb 0",
                param="kv_disk_path",
            ) from error

    def close(self) -> None:
        with self._lock:
            self._replace_usage(-1)

    def path_of(self, key: bytes) -> str:
        """Where a block is, or would be."""
        name = key[ROOT_BYTES:].hex()
        return f"{self.path}/{key[:ROOT_BYTES].hex()}/{name[:2]}/{name}"

    # Reading

    def find_block(self, key: bytes) -> FoundBlock | None:
        """A look at the folder itself: what another process wrote is there too."""
        try:
            info = os.stat(self.path_of(key), follow_symlinks=False)
        except OSError:
            return None
        return FoundBlock(key, info.st_size, info.st_mtime) if stat.S_ISREG(info.st_mode) else None

    def open_block(self, key: bytes) -> int:
        """A file descriptor whose pages are on their way from disk. Raises OSError."""
        # NONBLOCK: a pipe by that name must not hold anybody up.
        fd = os.open(self.path_of(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        # Where the file system knows no advice, reading is slower, not wrong.
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        return fd

    @staticmethod
    def read_block(fd: int, expected: BlockHeader) -> bytearray:
        """The payload, checked in every way. Raises DamagedBlockError, OSError."""
        size = os.fstat(fd).st_size
        header = BlockHeader.decode(os.pread(fd, HEADER_BYTES, 0))
        header.check(expected)
        if size != HEADER_BYTES + header.length:
            raise DamagedBlockError(
                f"truncated or extended: {size} bytes, not {HEADER_BYTES + header.length}"
            )
        payload = bytearray(header.length)
        done = 0
        with memoryview(payload) as view:
            while done < header.length:
                count = os.preadv(fd, [view[done:]], HEADER_BYTES + done)
                if not count:
                    break
                done += count
            check_payload(view[:done], header.length, header.checksum)
        return payload

    @staticmethod
    def touch(fd: int, now: float) -> None:
        """Notes the use of a block where its file's time is older than TOUCH_S: one change a minute."""
        if now - os.fstat(fd).st_mtime > TOUCH_S:
            with contextlib.suppress(OSError):
                os.utime(fd)

    # Changes

    def write_block(self, key: bytes, header: BlockHeader, payload: bytes | bytearray, limit: int) -> bool:
        """Writes one block beside the others and moves it to its place; True also if it was there.

        False when all blocks would then have more than ``limit`` bytes: remove some and try again.
        Raises OSError; nothing is left behind then.
        """
        temporary = str(self._tmp / secrets.token_hex(8))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            _write_all(fd, [header.encode(), payload])
            if self._move(temporary, key, HEADER_BYTES + header.length, limit):
                return True
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        return False

    def remove_block(self, key: bytes, unless_used_since: float | None = None) -> float | None:
        """Removes a block, or gives the time of its last use if that is after ``unless_used_since``.

        None as well when it was gone already. Raises OSError.
        """
        path = self.path_of(key)
        with self._locked():
            try:
                info = os.stat(path, follow_symlinks=False)
                if unless_used_since is not None and info.st_mtime > unless_used_since:
                    return info.st_mtime
                os.unlink(path)
            except FileNotFoundError:
                return None
            self._count(-info.st_size)
        return None

    def usage(self) -> Usage:
        """What all processes have written and not removed."""
        with self._locked():
            return self._read_usage()

    def correct(self, before: Usage, num_bytes: int) -> None:
        """Mends the count after a scan that found ``num_bytes`` and began at ``before``.

        Exact if nothing changed meanwhile. Otherwise the truth lies between what was found without all that
        was removed, and with all that was added: a count outside goes to the nearer of the two.
        """
        with self._locked():
            now = self._read_usage()
            least = num_bytes - (now.removed - before.removed)
            most = num_bytes + (now.added - before.added)
            count = min(max(now.num_bytes, least), most) if now.known else most
            self._write_usage(Usage(max(0, count), now.added, now.removed))

    def reopen(self) -> None:
        """Looks for ``usage`` anew: somebody may have emptied the folder. Raises OSError."""
        self._tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = self._open_usage()
        with self._lock:
            self._replace_usage(fd)

    # Looking around

    def scan(self) -> Iterator[list[FoundBlock]]:
        """All blocks of all roots, one folder's at a time; other files are left alone and not counted."""
        for root in _folders(str(self.path), _ROOT_NAME):
            for fan in _folders(root.path, _FAN_NAME):
                found = []
                with contextlib.suppress(FileNotFoundError), os.scandir(fan.path) as entries:
                    for entry in entries:
                        if _BLOCK_NAME.fullmatch(entry.name):
                            with contextlib.suppress(FileNotFoundError):
                                info = entry.stat(follow_symlinks=False)
                                if stat.S_ISREG(info.st_mode):
                                    key = bytes.fromhex(root.name + entry.name)
                                    found.append(FoundBlock(key, info.st_size, info.st_mtime))
                yield found

    def remove_leftovers(self) -> int:
        """Removes what dead processes were writing; how many files that were."""
        count = 0
        with os.scandir(self._tmp) as entries:
            names = [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
        for name in names:
            # Finished meanwhile, or its writer holds the lock: both are as they should be.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name)
                    count += 1
                finally:
                    os.close(fd)
        return count

    def _move(self, temporary: str, key: bytes, num_bytes: int, limit: int) -> bool:
        path = self.path_of(key)
        with self._locked():
            if self._read_usage().num_bytes + num_bytes > limit:
                return False
            if os.path.lexists(path):
                os.unlink(temporary)  # another replica wrote the same
                return True
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                fan = os.path.dirname(path)
                for folder in (self.path, os.path.dirname(fan), fan):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700)
                os.rename(temporary, path)
            self._count(num_bytes)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._usage_fd < 0:
                raise OSError(self._trouble.errno, self._trouble.strerror)
            self._wait_for_lock()
            try:
                yield
            finally:
                fcntl.flock(self._usage_fd, fcntl.LOCK_UN)

    def _wait_for_lock(self) -> None:
        """Held for microseconds, unless its holder was stopped just then: that must not stop us as well."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._usage_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "another process does not let go of the folder") from None
                time.sleep(0.0005)

    def _replace_usage(self, fd: int) -> None:
        if self._usage_fd >= 0:
            os.close(self._usage_fd)
        self._usage_fd = fd

    def _open_usage(self) -> int:
        return os.open(self.path / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _read_usage(self) -> Usage:
        data = os.pread(self._usage_fd, _USAGE.size, 0)
        if len(data) < _USAGE.size:
            return Usage(0, 0, 0, known=False)
        num_bytes, added, removed = _USAGE.unpack(data)
        return Usage(num_bytes, added, removed, known=num_bytes >= 0)

    def _write_usage(self, usage: Usage) -> None:
        data = _USAGE.pack(usage.num_bytes, usage.added % 2**64, usage.removed % 2**64)
        os.pwrite(self._usage_fd, data, 0)

    def _count(self, num_bytes: int) -> None:
        now = self._read_usage()
        if now.known:
            added, removed = now.added + max(0, num_bytes), now.removed + max(0, -num_bytes)
            self._write_usage(Usage(max(0, now.num_bytes + num_bytes), added, removed))


def _folders(path: str, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        return [e for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return []


def _write_all(fd: int, parts: list[bytes | bytearray]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        count = os.writev(fd, views)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views and count:
            views[0] = views[0][count:]
