"""How a figure came about: enough to get it again, and to know when not to compare it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def base_recipe(command: str, *, threads: int, packages: tuple[str, ...] = ("torch",)) -> dict[str, str]:
    """Command, commit, device, software and how busy the machine was when the run began."""
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    return {
        "command": command,
        "commit": _commit(),
        "device": f"{_processor()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, {_system()}",
        "software": f"Python {platform.python_version()}, {versions}",
        "threads": str(threads),
        "level": "measured",
        "load average before": f"{os.getloadavg()[0]:.1f}",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
        return result.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except OSError:
        return "unknown"
    return (commit or "unknown") + (" with local changes" if changed else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _system() -> str:
    return f"{sys.platform} {platform.release()}"
