"""What the machine can do at most: streaming reads at a footprint, and matrix products.

    stream   threads read one buffer of the footprint again and again (a model's weights, token by token);
             part of it may stay in the last-level cache, as it would for the model
    gemm     the best rate of torch's own product over a few large shapes

Run as a program it prints, as JSON, the streams of the footprints it is given, without any the product:
``python -m headrace.bench.roofs THREADS [BYTES…]``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from headrace.bench.peaks import peak_rate

_STREAM_SOURCE = r"""
#include <stdint.h>
#include <stddef.h>
uint64_t stream_read(const uint64_t *data, size_t count, int threads) {
    uint64_t total = 0;
    #pragma omp parallel for num_threads(threads) schedule(static) reduction(^:total)
    for (size_t i = 0; i < count; i += 64) {
        uint64_t part = 0;
        for (size_t j = 0; j < 64; j++) part ^= data[i + j];
        total ^= part;
    }
    return total;
}
"""
_GEMM_SHAPES = ((512, 2048, 2048), (1024, 1024, 4096), (2048, 2048, 2048))


def stream_rate(footprint: int, threads: int, *, seconds: float = 1.0) -> tuple[float, str]:
    """Bytes per second of reading ``footprint`` bytes cyclically, and how it was measured."""
    size = footprint // 4096 * 4096
    # private: for memory that processes share the kernel gives no huge pages
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    how = ""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
        how = ", huge pages"
    data = torch.frombuffer(memory, dtype=torch.float32)
    data.uniform_()
    with tempfile.TemporaryDirectory() as folder:
        read = _compiled_reader(Path(folder))
        if read is None:
            previous = torch.get_num_threads()
            torch.set_num_threads(threads)
            best = _best_time(lambda: data.max(), seconds)
            torch.set_num_threads(previous)
            return size / best, "torch max over float32 (no C compiler)" + how
        pointer = ctypes.c_void_p(data.data_ptr())
        count = ctypes.c_size_t(size // 8)
        best = _best_time(lambda: read(pointer, count, ctypes.c_int(threads)), seconds)
    return size / best, "C loop of 64-bit reads, OpenMP" + how


def gemm_rate(dtype: torch.dtype, threads: int, *, seconds: float = 1.0) -> float:
    """Best operations per second of ``torch.mm`` over a few large shapes; of bytes those of
    ``torch._int_mm``, 0 where this torch has none."""
    multiply = torch.mm if dtype.is_floating_point else getattr(torch, "_int_mm", None)
    if multiply is None:
        return 0.0
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = 0.0
    for rows, inner, columns in _GEMM_SHAPES:
        left = torch.randn(rows, inner).to(dtype)
        right = torch.randn(columns, inner).to(dtype).t()
        taken = _best_time(partial(multiply, left, right), seconds / len(_GEMM_SHAPES))
        best = max(best, 2.0 * rows * inner * columns / taken)
    torch.set_num_threads(previous)
    return best


def product_rate(dtype: str, threads: int, *, seconds: float = 1.0) -> float:
    """Best operations per second of products in ``dtype`` ("float32", "bfloat16", "int8" for bytes summed in
    32 bits): torch's own, or more where the cores' instruction for it could do more. 0: not measured."""
    return max(gemm_rate(getattr(torch, dtype), threads, seconds=seconds), peak_rate(dtype, threads))


def _best_time(call: Callable[[], object], seconds: float) -> float:
    """The shortest of the calls that fit into ``seconds``: a roof is what was possible, not typical."""
    call()
    best = float("inf")
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def _compiled_reader(folder: Path) -> Callable[..., int] | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = folder / "stream.c", folder / "stream.so"
    source.write_text(_STREAM_SOURCE)
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    command = [compiler, *flags, str(source), "-o", str(library)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return None
    function = ctypes.CDLL(str(library)).stream_read
    function.restype = ctypes.c_uint64
    reader: Callable[..., int] = function
    return reader


def main(arguments: list[str]) -> None:
    threads, footprints = int(arguments[0]), [int(text) for text in arguments[1:]]
    if footprints:
        print(json.dumps({"stream": {size: stream_rate(size, threads)[0] for size in footprints}}))
    else:
        print(json.dumps({"gemm_bf16": gemm_rate(torch.bfloat16, threads)}))


if __name__ == "__main__":
    main(sys.argv[1:])
