"""Packs as they ship: signed, of kernels in plain C++."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.packs import KernelEntry, PackConditions, PackManifest
from headrace.engine.start_kernels import Shipped
from headrace.optimize.keys import TRUSTED, Keys
from tests.kernels.native.conftest import SOURCES


class PackShelf:
    """A folder of packs, and the project's key that signs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "packs"
        self.folder.mkdir(parents=True)
        self.keys = Keys(folder / "keys")
        self.keys.sign(b"")  # makes the key

    def shipped(self, **options: Any) -> Shipped:
        return Shipped(folder=self.folder, keys=self.keys.folder / TRUSTED, **options)

    def add(
        self,
        name: str,
        *,
        sources: Path = SOURCES,
        ops: Sequence[str] = ("logits_head",),
        features: Sequence[str] = (),
        keys: Keys | None = None,
        dtype: str = "bfloat16",
        shapes: dict[str, int] | None = None,
        **entry: Any,
    ) -> str:
        """A signed pack; returns its id. ``entry``: fields of its kernels' entries."""
        folder = self.folder / name
        folder.mkdir()
        for path in (*sources.glob("*.h"), *(sources / f"{op}.cpp" for op in ops)):
            shutil.copyfile(path, folder / path.name)
        fields: dict[str, Any] = {"max_rows": 0, "phases": ["decode", "prefill"], **entry}
        manifest = PackManifest(
            format=1,
            name=name,
            kind="kernels",
            kernels=[KernelEntry(op=op, source=f"{op}.cpp", **fields) for op in ops],
            conditions=PackConditions(cpu_features=list(features), dtype=dtype, shapes=shapes or {}),
            author="tests",
            round_id="r1",
            licence="Apache-2.0",
            created="2026-01-01T00:00:00Z",
            files={p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())},
        )
        body = msgspec.json.encode(manifest)
        (folder / "pack.json").write_bytes(body)
        (folder / "signature.json").write_bytes(msgspec.json.encode((keys or self.keys).sign(body)))
        return hashlib.sha256(body).hexdigest()
