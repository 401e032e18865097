"""The roofs of this machine, measured in a process of its own beside an idle engine.

As a program it prints them as JSON, to go with a trace that was taken on another machine:
``python -m headrace.optimize.profile.roofs [--threads N] [--footprint BYTES]… > roofs.json``.
On a CUDA device (``--device cuda``) reads are timed by a copy, which moves every byte twice.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from headrace.bench.roofs import product_rate, stream_rate
from headrace.core.errors import EngineError, TimeUpError
from headrace.core.machine import available_memory, num_cores
from headrace.core.words import count
from headrace.optimize.records import Roofs

MIB = 1024**2
# What is used and made within an op stays in the near caches; smaller footprints measure the call.
NEAR_FOOTPRINT = MIB
_LARGEST_FOOTPRINT = 4096 * MIB
_NEARLY_THE_SAME = 1.1
_CUDA_SHAPE = 8192
DTYPES = ("float32", "bfloat16", "float16", "int8")


def measure_roofs(
    footprints: Iterable[float], dtypes: Iterable[str], threads: int, *, limit_s: float = math.inf
) -> Roofs:
    """Stream rates at ``footprints`` in bytes and at a near one, product rates of ``dtypes``; takes about a
    second each. Raises EngineError when the measurement fails, TimeUpError when it takes more than
    ``limit_s``."""
    command = [sys.executable, "-m", __name__, "--threads", str(threads)]
    for footprint in _apart([NEAR_FOOTPRINT, *(_measurable(size) for size in footprints)]):
        command += ["--footprint", str(footprint)]
    for dtype in sorted(set(dtypes)):
        command += ["--dtype", dtype]
    timeout = None if math.isinf(limit_s) else max(0.0, limit_s)
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeUpError(
            "the time was up before the machine's roofs were measured", hint="give it more time"
        ) from None
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise EngineError(f"the machine's roofs could not be measured: {''.join(last) or done.returncode}")
    return msgspec.json.decode(done.stdout, type=Roofs)


def _measurable(footprint: float) -> int:
    """Whole MiB, no more than fits beside the model: beyond the caches the rate hardly changes."""
    most = min(_LARGEST_FOOTPRINT, available_memory() // 2)
    return max(1, round(min(footprint, most) / MIB)) * MIB


def _apart(footprints: list[int]) -> list[int]:
    """In order, without those that are nearly the same as a smaller one."""
    kept: list[int] = []
    for footprint in sorted(footprints):
        if not kept or footprint > _NEARLY_THE_SAME * kept[-1]:
            kept.append(footprint)
    return kept


def _on_cpu(footprints: list[int], dtypes: list[str], threads: int) -> Roofs:
    stream, method = {}, ""
    for footprint in footprints:
        stream[footprint], method = stream_rate(footprint, threads)
    rates = {dtype: product_rate(dtype, threads) for dtype in dtypes}
    gemm = {dtype: rate for dtype, rate in rates.items() if rate}
    return Roofs(
        stream=stream,
        gemm=gemm,
        method=f"{method}; the better of torch's products and the multiply-add instruction; "
        f"{count(threads, 'thread')}, best of a second",
    )


def _on_cuda(footprints: list[int], dtypes: list[str]) -> Roofs:
    stream = {}
    for footprint in footprints:
        data = torch.empty(footprint // 8, dtype=torch.float32, device="cuda")
        copy = torch.empty_like(data)
        stream[footprint] = 2.0 * data.nbytes / _cuda_seconds(lambda: copy.copy_(data))  # noqa: B023
    gemm = {}
    for dtype in dtypes:
        left = torch.randn(_CUDA_SHAPE, _CUDA_SHAPE, device="cuda").to(getattr(torch, dtype))
        gemm[dtype] = 2.0 * _CUDA_SHAPE**3 / _cuda_seconds(lambda: torch.mm(left, left))  # noqa: B023
    name = torch.cuda.get_device_name()
    return Roofs(stream=stream, gemm=gemm, method=f"copy within {name}, torch.mm; best of 20")


def _cuda_seconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(21):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures this machine's roofs and prints them as JSON.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=num_cores(), metavar="N")
    parser.add_argument("--footprint", type=int, action="append", default=[], metavar="BYTES")
    parser.add_argument("--dtype", action="append", default=[], choices=DTYPES)
    arguments = parser.parse_args(argv)
    dtypes = arguments.dtype or ["float32", "bfloat16"]
    if arguments.device == "cuda":
        roofs = _on_cuda(arguments.footprint or [64 * MIB, 4096 * MIB], dtypes)
    else:
        footprints = arguments.footprint or [NEAR_FOOTPRINT, 64 * MIB, 256 * MIB, 1024 * MIB]
        roofs = _on_cpu(footprints, dtypes, arguments.threads)
    sys.stdout.buffer.write(msgspec.json.encode(roofs) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
