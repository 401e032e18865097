"""A built kernel, loaded into this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from headrace.core.errors import PackError
from headrace.kernels.native.abi import Pack, PackedBytes, Run


class NativeKernel:
    """A shared object's three functions; the latter two None when it does not pack.

    It stays loaded until the process ends: its threads may outlive every call.
    Raises PackError when the file cannot be loaded or lacks a function.
    """

    def __init__(self, library: Path) -> None:
        _share_openmp()
        try:
            loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise PackError(f"{library.name} cannot be loaded: {error}") from None
        missing = [] if hasattr(loaded, "hr_run") else ["hr_run"]
        packs = hasattr(loaded, "hr_pack")
        if packs != hasattr(loaded, "hr_packed_bytes"):
            missing.append("hr_packed_bytes" if packs else "hr_pack")
        if missing:
            raise PackError(f'{library.name} has no function {missing[0]}; is it extern "C"?')
        self.library = library
        self.run: Run = _function(loaded.hr_run, ctypes.c_int, 1)
        self.packed_bytes: PackedBytes | None = None
        self.pack: Pack | None = None
        if packs:
            self.packed_bytes = _function(loaded.hr_packed_bytes, ctypes.c_int64, 1)
            self.pack = _function(loaded.hr_pack, ctypes.c_int, 2)


def _function(function: Any, result: Any, num_pointers: int) -> Any:
    function.restype = result
    function.argtypes = [ctypes.c_void_p] * num_pointers
    return function


def _share_openmp() -> None:
    """Lets kernels use the OpenMP runtime that torch has loaded, whatever torch's wheel calls the file: two
    runtimes are two sets of threads, and idle ones spin where the others should work."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for path in {line.split(maxsplit=5)[-1] for line in mapped.splitlines() if "libgomp" in line}:
        with contextlib.suppress(OSError):  # replaced on disk meanwhile
            ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
