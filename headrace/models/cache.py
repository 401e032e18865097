"""Headrace's folder of derived files, and the three things that keep it sound.

    $XDG_CACHE_HOME/headrace/          default ~/.cache/headrace
    ├── packages/<short name>-<version>/   GGUF files fetched for short names
    ├── converted/<key>/                   model folders made from GGUF files
    │   └── .<key>.partial-*               being written, or left over from a kill
    ├── digests/                           sha256 of big files, remembered
    └── locks/                             one empty file per folder being made

A folder appears under its name only when it is complete, by one rename; whoever makes it holds its lock,
so two processes that want the same thing make it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.core.errors import StartupError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all; often, from the caller's thread."""

_PIECE_BYTES = 1 << 22


def cache_folder() -> Path:
    """Where everything derived is kept; ``XDG_CACHE_HOME`` moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(base):  # the XDG specification says to ignore relative paths
        base = os.path.expanduser("~/.cache")
    return Path(base) / "headrace"


def kv_folder(path: str | None) -> Path:
    """Where the disk tier keeps blocks, if ``path`` is what was asked for."""
    return Path(path).expanduser() if path else cache_folder() / "kv"


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that do not want to be told."""


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds the cache's lock ``name`` against other processes; a dead process's lock is free."""
    path = cache_folder() / "locks" / f"{name}.lock"
    with _writable(path.parent), path.open("a") as file:
        with contextlib.suppress(OSError):  # a file system without locks: the rename still decides
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_folder(target: Path, *, needed_bytes: int) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``target`` when the block ends well and is removed otherwise.

    Leftovers of earlier attempts go first. Raises StartupError where there is no room or no permission.
    """
    with _writable(target.parent):
        for leftover in target.parent.glob(f".{target.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise StartupError(
                f"{needed_bytes / 1e9:.1f} GB are needed in {target.parent}, {free / 1e9:.1f} GB are free",
                hint="Free some space, or set XDG_CACHE_HOME to a larger disk.",
            )
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            folder.chmod(0o755)
            yield folder
            _replace(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, target: Path) -> None:
    """Renames ``folder`` to ``target``; what was there (incomplete, or another process's) gives way."""
    for _ in range(3):
        try:
            folder.rename(target)
            return
        except OSError:
            if not target.exists():
                raise
            stale = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
            with contextlib.suppress(OSError):
                target.rename(stale / "old")
            shutil.rmtree(stale, ignore_errors=True)
    raise StartupError(f"{target} cannot be replaced", hint="Remove that folder and start again.")


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BrokenPipeError:  # a progress callback's output went away; no matter of the cache
        raise
    except OSError as error:
        raise StartupError(
            f"the cache {folder} cannot be written: {error}",
            hint="Set XDG_CACHE_HOME to a folder on a disk with room that you may write to.",
        ) from error


def file_digest(path: Path, progress: Progress = no_progress) -> str:
    """SHA-256 of a file, hexadecimal, remembered by path, size, modification time and inode."""
    path = path.resolve()
    stat = path.stat()
    identity = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    memo = cache_folder() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    known = read_record(memo)
    if isinstance(known, dict) and known.get("file") == identity and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    digest = hashlib.sha256()
    done = 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            digest.update(buffer[:length])
            done += length
            progress(f"reading {path.name}", done, stat.st_size)
    with contextlib.suppress(OSError):  # forgetting it only costs time
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, {"file": identity, "sha256": digest.hexdigest()})
    return digest.hexdigest()


def read_record(path: Path) -> Any:
    """The content of a file that we wrote, or None where there is none that parses: it is made again."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Writes ``content`` so that the file is either the old one or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
    temporary.replace(path)
