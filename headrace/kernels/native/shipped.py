"""The packs that ship with Headrace: found, checked against the project's keys, built once a machine.

    packs/<name>/     beside the package: pack.json, signature.json, kernels/, evidence/

A pack is looked at in this order, and passed over with the reason at the first step that fails:

    find     its signature is the project's; this CPU has the features it needs. Those that need the most
             features come first: they were written for the newer CPU
    build    once a machine (build_cache.py)
    bind     to the model's weights (pack.py), once those are loaded
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.core.errors import PackError, StartupError
from headrace.core.files import read_regular
from headrace.core.packs import PackManifest
from headrace.core.signatures import MAX_BYTES, PROJECT_KEYS, Signature, check_signature, read_keys
from headrace.kernels.native.build import cpu_features
from headrace.kernels.native.pack import (
    MANIFEST,
    read_manifest,
)

SIGNATURE = "signature.json"


def shipped_folder() -> Path:
    """``packs/`` beside the package; it need not exist."""
    return Path(__file__).parents[3] / "packs"


@dataclass(frozen=True)
class ShippedPack:
    """One that may run on this CPU. ``pack_id`` is the digest of its manifest."""

    folder: Path
    manifest: PackManifest
    pack_id: str

    @property
    def name(self) -> str:
        return self.folder.name


def find_shipped(folder: Path, keys: Path = PROJECT_KEYS) -> tuple[list[ShippedPack], list[str]]:
    """Packs below ``folder`` that this CPU can run, the best first; and for each other one why not."""
    found, passed_over = [], []
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{folder} cannot be read ({error.strerror})"]
    for path in paths:
        try:
            if _is_pack(path):
                found.append(_check(path, keys))
        except StartupError as error:
            passed_over.append(f"{path.name}: {error.message}")
    found.sort(key=lambda pack: (-len(pack.manifest.conditions.cpu_features), pack.name))
    return found, passed_over


def _is_pack(path: Path) -> bool:
    """Sources alone are none, nor is a file. Raises PackError where it cannot be told, or a part is gone."""
    try:
        names = os.listdir(path)
    except NotADirectoryError:
        return False
    except OSError as error:
        raise PackError(f"it cannot be read ({error.strerror})") from None
    if MANIFEST in names:
        return True
    if SIGNATURE in names:
        raise PackError(f"it is signed, and its {MANIFEST} is missing")
    return False


def _check(folder: Path, keys: Path) -> ShippedPack:
    """Raises PackError. The files are checked against the manifest as they are built."""
    manifest, pack_id = read_manifest(folder)
    try:
        body = read_regular(folder / MANIFEST, MAX_BYTES)
        signature = msgspec.json.decode(read_regular(folder / SIGNATURE, MAX_BYTES), type=Signature)
    except FileNotFoundError:
        raise PackError("it is not signed") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PackError(f"{SIGNATURE}: {error}") from None
    reason = check_signature(body, signature, read_keys(keys), "the project's own")
    if reason is not None:
        raise PackError(reason)
    missing = sorted(set(manifest.conditions.cpu_features) - cpu_features())
    if missing:
        raise PackError(f"this CPU lacks {', '.join(missing)}")
    return ShippedPack(folder, manifest, pack_id)
