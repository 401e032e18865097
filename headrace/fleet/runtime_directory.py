"""Where one server keeps its sockets while it runs.

    $TMPDIR/headrace-run-XXXXXXXX/     0700
        lock                           held (flock) by the server, so freed by its death, however it dies
        0-replica-0.sock, …            of its children

The next server removes the folders whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

PREFIX = "headrace-run-"
LOCK = "lock"

log = logging.getLogger("headrace.fleet")


class RuntimeDirectory:
    """A folder of its own, for as long as this process lives at most. A context manager."""

    def __init__(self, base: Path | None = None) -> None:
        """``base`` defaults to the system's folder for temporary files."""
        base = base or Path(tempfile.gettempdir())
        self._numbers = itertools.count()
        remove_abandoned(base)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self._lock = _lock(self.path / LOCK)
            if self._lock is not None and (self.path / LOCK).exists():
                break
            # Another server that starts just now found it before it was locked, and took it for abandoned.
            self.close()

    def __enter__(self) -> RuntimeDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def socket(self, name: str) -> str:
        """A path for a socket of ``name``, which may be any text; another one each time."""
        readable = re.sub(r"[^A-Za-z0-9.-]", "_", name)[:16]
        return str(self.path / f"{next(self._numbers)}-{readable}.sock")

    def close(self) -> None:
        """Removes it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(base: Path) -> None:
    """Removes this user's runtime folders in ``base`` whose server is gone; leaves all others alone."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / LOCK).is_file():
                continue
            lock = _lock(folder / LOCK)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                log.info("removed %s, which a server left behind", folder)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock (closed by an exec), or None: somebody else holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
