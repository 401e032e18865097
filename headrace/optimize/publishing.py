"""A round's winner as a pack in the registry: the last step of every loop."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from headrace.core.packs import PackConditions
from headrace.kernels.native.build import cpu_features
from headrace.optimize.keys import Keys
from headrace.optimize.packing import SIGNATURE, Winner, make_pack
from headrace.optimize.records import Published
from headrace.optimize.registry import Registry
from headrace.optimize.rounds import Round

RELEVANT_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16",
                     "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")  # fmt: skip
"""What kernels are written for: a pack runs only where those of the machine that judged it are all there."""


def publish(
    winner: Winner,
    one: Round,
    registry: Registry,
    keys: Keys,
    *,
    dtype: str,
    shapes: Mapping[str, int],
    approver: str,
    base: Path | None = None,
) -> Published:
    """Makes the round's pack, unless a round that was killed has one already, and publishes it."""
    folder = one.folder / "pack"
    if not (folder / SIGNATURE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        there = cpu_features()
        make_pack(
            folder,
            winner,
            name=one.id,
            conditions=PackConditions(
                cpu_features=[name for name in RELEVANT_FEATURES if name in there],
                dtype=dtype,
                shapes=dict(shapes),
            ),
            round_id=one.id,
            keys=keys,
            base=base,
        )
    identity = registry.publish(folder, approver=approver)
    summary = registry.find(identity).manifest.summary
    return Published(pack=identity, registry=registry.url, candidate=winner.folder.name, summary=summary)
