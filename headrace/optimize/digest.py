"""The digest that ties a candidate to its verdict, its measurement and the pack that it becomes."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = frozenset({".c", ".cc", ".cpp", ".h", ".hpp", ".inc", ".py", ".cu"})
ENTRY_FILE = "kernel.json"
HEADER = "headrace_kernel.h"


def candidate_files(folder: Path) -> list[str]:
    """What a candidate consists of: kernel.json and its sources, not the header that every build adds.

    Relative paths, sorted. Links and whatever else lies in the folder do not count.
    """
    found = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        wanted = name == ENTRY_FILE or (path.suffix in SUFFIXES and path.name != HEADER)
        if wanted and path.is_file() and not path.is_symlink():
            found.append(name)
    return sorted(found)


def candidate_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of ``candidate_files``, hexadecimal."""
    total = hashlib.sha256()
    for name in candidate_files(folder):
        line = f"{name}\0{file_digest(folder / name)}\n"
        total.update(line.encode(errors="surrogateescape"))  # names need not be UTF-8
    return total.hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
