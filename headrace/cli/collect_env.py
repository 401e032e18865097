"""collect-env: print what a bug report needs to know about this machine."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from headrace.core.version import __version__

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "msgspec",
    "pyzmq",
    "uvloop",
    "httptools",
    "aiohttp",
)
CPU_FEATURES = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)
VARIABLES = ("HEADRACE_", "OMP_", "KMP_", "MKL_", "TORCH_", "HF_", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def main(arguments: argparse.Namespace) -> int:
    for name, value in report():
        print(f"{name:<14} {value}")
    return 0


def report() -> list[tuple[str, str]]:
    """Facts as (name, value); secrets are named but not shown."""
    rows = [
        ("headrace", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("libc", " ".join(platform.libc_ver())),
        *_cpu(),
        *_memory(),
        ("compiler", _version_line("g++")),
        ("gpu", _version_line("nvidia-smi", "-L")),
    ]
    rows += [(package, _package_version(package)) for package in PACKAGES]
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            secret = any(word in name for word in SECRET_WORDS)
            rows.append((name, "(set, not shown)" if secret else os.environ[name]))
    return rows


def _cpu() -> list[tuple[str, str]]:
    model, flags = platform.processor() or "unknown", set[str]()
    for line in _read_lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    present = [feature for feature in CPU_FEATURES if feature in flags]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("cpu", f"{model}, {usable} of {os.cpu_count()} cores usable"),
        ("cpu features", " ".join(present) or "unknown"),
    ]


def _memory() -> list[tuple[str, str]]:
    wanted = {"MemTotal": "memory", "MemAvailable": "available"}
    rows = []
    for line in _read_lines("/proc/meminfo"):
        key, _, value = line.partition(":")
        if key in wanted:
            rows.append((wanted[key], f"{int(value.split()[0]) / 2**20:.1f} GiB"))
    limit = _read_lines("/sys/fs/cgroup/memory.max")
    if limit and limit[0].isdigit():
        rows.append(("cgroup limit", f"{int(limit[0]) / 2**30:.1f} GiB"))
    return rows


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _version_line(program: str, flag: str = "--version") -> str:
    if shutil.which(program) is None:
        return "not found"
    try:
        result = subprocess.run([program, flag], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    lines = (result.stdout or result.stderr).strip().splitlines()
    return lines[0] if lines else f"exit code {result.returncode}"


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
