"""What this machine, or the part of it that this process may use, has to give."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def host_id() -> str:
    """The same for all processes of one running machine, another one for any other; empty: not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of main memory that this process could still take, within its control group's limit."""
    return min(_system_available(), _cgroup_available())


def _system_available() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**62


def _cgroup_available() -> int:
    """What the control groups (version 2 or 1) still allow; page cache they could drop counts as free."""
    least = 2**62
    for base, limit_file, usage_file, stat_key, controller in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", ""),
        (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
            "memory",
        ),
    ):
        for folder in _cgroup_folders(base, controller):
            # A group without a limit says "max" or has no such file.
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / limit_file).read_text())
                usage = int((folder / usage_file).read_text())
                least = min(least, max(0, limit - usage + _reclaimable(folder / "memory.stat", stat_key)))
    return least


def _cgroup_folders(base: str, controller: str) -> list[Path]:
    """The process's own group and all above it, up to ``base``."""
    inner = "/"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                inner = path
    own = Path(base + inner)
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(base)]


def _reclaimable(stat: Path, key: str) -> int:
    for line in stat.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
