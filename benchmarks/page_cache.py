"""The page cache of a disk tier's blocks: dropped before a read that must come from the disk, and counted."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.core.errors import UsageError

PAGE = 4096
BLOCK_NAME_LENGTH = 64


def drop(folder: Path) -> None:
    """Writes out and drops every block under ``folder``; files that vanish meanwhile are left out."""
    for descriptor in _each(folder):
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def left(folder: Path) -> int:
    """How many blocks under ``folder`` have a page in memory, of four looked at: a read that may not wait
    gives such a page and fails for any other. Raises UsageError where the file system has no such reads."""
    return sum(_has_page(descriptor) for descriptor in _each(folder))


def file_system(folder: Path) -> str:
    """Type of the file system that ``folder`` is on, and its device."""
    best, found = "", "an unknown file system"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            device, mount, kind = line.split()[:3]
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(best):
                best, found = mount, f"{kind} ({device})"
    return found


def _has_page(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    for quarter in range(4):
        try:
            # Whatever is in memory is given; looking brings nothing in.
            if os.preadv(descriptor, [bytearray(1)], quarter * size // 4 // PAGE * PAGE, os.RWF_NOWAIT):
                return True
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                raise UsageError(
                    "this file system does not say what of a file is in memory",
                    hint="choose a folder on a local disk, such as ext4 or xfs",
                ) from None
            if error.errno != errno.EAGAIN:
                raise
    return False


def _each(folder: Path) -> Iterator[int]:
    """A descriptor of every block's file, one after the other."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if len(name) != BLOCK_NAME_LENGTH:
                continue
            try:
                descriptor = os.open(Path(parent, name), os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                yield descriptor
            finally:
                os.close(descriptor)
