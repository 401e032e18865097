"""What `headrace serve` looks at before it opens a disk tier: may it, and is there room?"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig
from headrace.kvcache.disk_folder import DiskFolder
from headrace.models.cache import kv_folder

GB = 1e9


def disk_warnings(engines: Iterable[EngineConfig]) -> Iterator[str]:
    """One line for each disk that has less room than its tier may take, and for a folder of no tier.

    A warning and no refusal, as space comes and goes while a server runs: the tier stops at a full disk and
    goes on when there is room again, and a server that restarts must not stay away for that. Raises
    UsageError for a folder that cannot be written, and for a tier without a prefix cache.
    """
    limits: dict[Path, float] = {}
    idle: dict[str, None] = {}  # in order
    for engine in engines:
        if not engine.kv_disk_gb:
            if engine.kv_disk_path:
                idle.setdefault(engine.kv_disk_path)
            continue
        if not engine.enable_prefix_caching:
            raise UsageError(
                "--kv-disk-gb keeps what the prefix cache has no room for, and prefix caching is off",
                hint="leave out one of --kv-disk-gb and --no-enable-prefix-caching",
                param="--kv-disk-gb",
            )
        path = kv_folder(engine.kv_disk_path)
        limits[path] = max(engine.kv_disk_gb, limits.get(path, 0.0))
    for name in idle:
        if kv_folder(name) not in limits:
            yield f"--kv-disk-path {name} means nothing without --kv-disk-gb: no blocks are kept on disk"
    for path, limit_gb in limits.items():
        try:
            room = _room(path) / GB
        except OSError as error:
            yield (
                f"the disk tier in {path} takes no blocks now ({error.strerror or error}); serving goes on, "
                "and it is tried again"
            )
            continue
        if room < limit_gb:
            yield (
                f"--kv-disk-gb {limit_gb:g} is more than there is room for in {path} ({room:.3g} GB): "
                "the disk tier takes no more blocks once the disk is full"
            )


def _room(path: Path) -> float:
    """Bytes that the tier could come to. Raises OSError, and UsageError for a folder that is no use."""
    folder = DiskFolder(path)
    try:
        return shutil.disk_usage(path).free + folder.usage().num_bytes
    finally:
        folder.close()
