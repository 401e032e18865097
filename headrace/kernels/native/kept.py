"""Libraries on the disk: loaded only when they are what was built, and a process whose death does no harm has
loaded them before.

    some-<digest>.so          the library
    some-<digest>.so.sha256   the digest of its contents: one that differs is not the one that was built
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

from headrace.core.errors import CompileError
from headrace.core.words import describe_exit

log = logging.getLogger("headrace.kernels")

_LOAD_S = 30.0
_LOAD = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL)
except OSError as error:
    sys.exit(str(error))
for name in ("hr_run", "hr_pack", "hr_packed_bytes"):  # what is missing, whoever loads it will say
    hasattr(library, name)
"""


def is_whole(library: Path) -> bool:
    """Whether it is there as it was kept."""
    try:
        whole = _digest_file(library).read_bytes() == _digest_of(library).encode()
    except OSError:  # one of the two is not there
        return False
    if not whole:
        log.warning("%s is not as it was built: it is built again", library)
    return whole


def keep(built: Path, library: Path) -> None:
    """Moves ``built`` to ``library``, in the same file system. Raises OSError."""
    words = built.with_name(f"{built.name}.sha256")
    words.write_text(_digest_of(built))
    for path in (words, built):
        _sync(path)  # a power cut must not leave names of files without contents
    os.replace(words, _digest_file(library))
    os.replace(built, library)


def check_loads(library: Path, name: str) -> None:
    """Loads it in another process. Raises CompileError when it cannot be loaded, or that process crashes or
    hangs."""
    if not sys.executable:  # Python is embedded
        return
    command = [sys.executable, "-I", "-S", "-c", _LOAD, str(library)]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_LOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"{name} hangs when it is loaded") from None
    if ended.returncode < 0:
        raise CompileError(f"{name} crashes when it is loaded ({describe_exit(ended.returncode)})")
    if ended.returncode > 0:
        said = ended.stderr.decode(errors="replace").strip()
        raise CompileError(f"{name} cannot be loaded: {said}")


def _digest_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
