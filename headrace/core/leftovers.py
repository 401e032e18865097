"""Temporary folders that name their owner, so that those of a killed run can be swept away by the next.

headrace-<kind>-<namespace>-<process id>-…      .build-<namespace>-<process id>-…  (in the cache of kernels)

A process id means something in one namespace of processes (a container has its own) of one running system.
Where it is this process's, an owner that is not in sight is dead.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import zlib
from functools import lru_cache
from pathlib import Path

from headrace.core.machine import host_id

_KINDS = "agent|cage|compiler|judge|kernels|model|pack"
_NAME = re.compile(rf"(?:headrace-(?:{_KINDS})|\.build)-(?:(?:(\d+)-)?(\d+)-)?\w+")
_STALE_S = 3600.0
"""Younger ones of other namespaces stay: their owner may be in another container that shares the folder."""
_UNOWNED_S = 24 * 3600.0
"""The same for those that name no owner, as older versions made them."""


def prefix_of(kind: str) -> str:
    """For tempfile's ``prefix``; the first call of a process sweeps."""
    _sweep_once(Path(tempfile.gettempdir()))
    return f"headrace-{kind}-{owner()}-"


def owner() -> str:
    """This process in the name of a folder, for those that lie elsewhere than in the temporary one."""
    return f"{namespace()}-{os.getpid()}"


def sweep(folder: Path) -> list[Path]:
    """Removes this user's folders whose owner is gone; which."""
    gone: list[Path] = []
    try:
        paths = list(folder.iterdir())
    except OSError:  # not for us to read
        return gone
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        number, process = match.groups()
        if process is not None and Path(f"/proc/{process}").exists():
            continue
        try:
            found = path.stat()
        except OSError:
            continue
        limit = _STALE_S if process is not None else _UNOWNED_S
        is_dead = number is not None and int(number) == namespace() != 0
        if found.st_uid == os.geteuid() and (is_dead or time.time() - found.st_mtime > limit):
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
    return gone


def namespace() -> int:
    """A number for this process's namespace of processes, other on other machines that share a folder; 0: the
    system does not tell."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
    boot = host_id()
    return zlib.crc32(boot.encode()) << 32 | number if boot else 0


@lru_cache
def _sweep_once(folder: Path) -> None:
    if Path("/proc/self").exists():
        sweep(folder)
