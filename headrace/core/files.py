"""Files that somebody else may have put there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MEGABYTE = 1024 * 1024


@contextmanager
def open_regular(path: Path, flags: int = 0) -> Iterator[BinaryIO]:
    """A regular file to read. Raises OSError, with a ``strerror``; for a pipe or a device too, where a plain
    open or read might never return. ``flags`` of ``os.open``, beside those that it takes."""
    # without O_NONBLOCK the open itself waits for the other end of a pipe
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        file = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with file:
        yield file


def read_regular(path: Path, limit: int) -> bytes:
    """What a regular file of at most ``limit`` bytes holds. Raises OSError as ``open_regular`` does."""
    with open_regular(path) as file:
        body = file.read(limit + 1)
    if len(body) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit // MEGABYTE} MB", str(path))
    return body
