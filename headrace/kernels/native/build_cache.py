"""The libraries of a pack: checked, built by this machine's compiler, kept for the next start.

Whoever comes first builds; other processes wait and find what it built (build.py names a library by all that
went into it). Where the user's cache cannot be written, libraries lie in a temporary folder until they are
loaded, and are built anew at each start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from headrace.core.errors import PackError
from headrace.core.leftovers import prefix_of
from headrace.core.machine import num_cores
from headrace.core.packs import KernelEntry, PackManifest
from headrace.kernels.native.build import compile_kernel

log = logging.getLogger("headrace.kernels")

TIMEOUT_S = 600.0
_POLL_S = 0.1


@contextlib.contextmanager
def built(
    pack: Path, manifest: PackManifest, cache: Path | None = None, *, timeout_s: float = TIMEOUT_S
) -> Iterator[list[Path]]:
    """The libraries of the pack in a folder, in the manifest's order, there to be loaded until the end of the
    block: kept in ``cache`` (default: the user's), in a temporary folder where that cannot be written.

    Raises PackError and its children: no compiler, one that fails or takes too long, no place to build in.
    """
    folder = cache or default_build_folder()
    contents = read_files(pack, manifest)
    deadline = time.monotonic() + timeout_s
    scratch = ""
    try:
        try:
            with _lock(folder, deadline - timeout_s / 2):  # or a hanging one would leave us no time
                libraries = build_files(contents, manifest, folder, timeout_s=_left(deadline))
        except OSError as error:
            reason = f"{folder} ({error.strerror or error})"
            log.warning("kernels are built at each start: the cache cannot be written: %s", reason)
            try:  # not kept, and built anew at each start
                scratch = tempfile.mkdtemp(prefix=prefix_of("kernels"))
                libraries = build_files(contents, manifest, Path(scratch), timeout_s=_left(deadline))
            except OSError as again:
                raise PackError(
                    f"kernels can be built neither in {reason} nor in {tempfile.gettempdir()} "
                    f"({again.strerror or again})",
                    hint="make room in one of them, or set XDG_CACHE_HOME",
                ) from None
        yield libraries
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)  # what was loaded from it stays loaded


def build_pack(
    folder: Path, manifest: PackManifest, build_folder: Path, *, timeout_s: float = TIMEOUT_S
) -> list[Path]:
    """A library for each of the manifest's kernels, in order. Checks every file's digest first.

    Raises PackError and its children.
    """
    contents = read_files(folder, manifest)
    try:
        return build_files(contents, manifest, build_folder, timeout_s=timeout_s)
    except OSError as error:
        raise PackError(
            f"kernels cannot be built in {build_folder}: {error.strerror}", hint="set XDG_CACHE_HOME"
        ) from None


def read_files(folder: Path, manifest: PackManifest) -> dict[str, bytes]:
    """The contents of the manifest's files, which are those it names. Raises PackError."""
    contents = {name: _read_checked(folder, name, digest) for name, digest in manifest.files.items()}
    for entry in manifest.kernels:
        if entry.source not in contents:
            raise PackError(f"the pack's manifest has no file {entry.source!r}, its source for {entry.op}")
    return contents


def build_files(
    contents: Mapping[str, bytes], manifest: PackManifest, build_folder: Path, *, timeout_s: float = TIMEOUT_S
) -> list[Path]:
    """As ``build_pack``, from contents that were checked; several compilers at once, one a core.

    Raises PackError's children, and OSError where a folder cannot be written.
    """
    # what is compiled is what was checked, whatever happens to the folder meanwhile
    with tempfile.TemporaryDirectory(prefix=prefix_of("pack")) as scratch:
        copy = Path(scratch)
        for name, content in contents.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)

        deadline = time.monotonic() + timeout_s

        def build(entry: KernelEntry) -> Path:
            left = _left(deadline)  # with few cores one waits for another
            return compile_kernel(copy / entry.source, entry.flags, build_folder, timeout_s=left)

        num_workers = max(1, min(len(manifest.kernels), num_cores()))
        with ThreadPoolExecutor(num_workers, "build") as pool:
            return list(pool.map(build, manifest.kernels))


def default_build_folder() -> Path:
    """$XDG_CACHE_HOME/headrace/kernels, or the same below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "headrace" / "kernels"


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


@contextlib.contextmanager
def _lock(folder: Path, deadline: float) -> Iterator[None]:
    """One builds, others find what it built. Who cannot lock, or waited long enough, goes on without."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)  # of the folder itself: it needs no file
            stack.callback(os.close, descriptor)
            free = _take(descriptor)
            if not free:
                log.warning("waiting for another process that builds kernels in %s", folder)
            while not free and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                free = _take(descriptor)
        yield


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_checked(folder: Path, name: str, digest: str) -> bytes:
    path, pure = folder / name, PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise PackError(f"the pack's manifest names {name!r}, which is no path inside the pack")
    try:
        if path.is_symlink() or not path.is_file():
            raise PackError(f"the pack's file {name} is missing, or no plain file")
        content = path.read_bytes()
    except OSError as error:
        raise PackError(f"the pack's file {name} cannot be read: {error.strerror}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise PackError(
            f"the pack's file {name} is not the one that was judged: "
            f"its digest is {found[:12]}…, the manifest says {digest[:12]}…"
        )
    return content
