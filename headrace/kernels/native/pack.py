"""From a pack's folder to a table in which its kernels run.

    check    the pack's files are those of its manifest, this machine and model are those it was made for
    build    each source, from a private copy of what was checked (build.py)
    bind     each kernel to the model's weights, packed as it likes (op.py)

Nothing of the model or of the table in use changes, so this may run in a thread beside the step loop.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from headrace.core.errors import PackError
from headrace.core.packs import KernelEntry, PackConditions, PackManifest
from headrace.kernels.native.build import compile_kernel, cpu_features
from headrace.kernels.native.op import NativeKernel, make_op
from headrace.kernels.native.store import WeightStore
from headrace.kernels.table import OpTable
from headrace.kernels.weights import DecoderWeights

FORMAT = 1
MANIFEST = "pack.json"


@runtime_checkable
class Packable(Protocol):
    """A model whose weights and dimensions are known: our own decoder."""

    @property
    def weights(self) -> DecoderWeights: ...
    @property
    def dims(self) -> dict[str, int]: ...


def load_pack(
    folder: Path,
    base: OpTable,
    model: object,
    *,
    trusted: Callable[[Path], object] | None = None,
    build_folder: Path | None = None,
) -> OpTable:
    """``base`` with the ops that the pack in ``folder`` provides for ``model``; their source is its id.

    ``model`` is a Decoder. ``trusted`` is called with the folder before anything is compiled and raises
    PackError when its signature does not hold; None: the caller has checked it. Libraries are kept in
    ``build_folder`` (default: the user's cache). ``OpTable.nbytes`` of the result is the memory that the
    kernels' forms of the weights take.

    Raises PackError: a file that is missing or not the manifest's, another machine, dtype or model; its
    children for a source that does not compile and for a machine without compiler.
    """
    manifest, pack_id = read_manifest(folder)
    if trusted is not None:
        trusted(folder)
    if not isinstance(model, Packable):
        raise PackError(
            "the model runs on Transformers' definition, and packs are for Headrace's own decoder",
            hint="serve the model without a pack",
        )
    weights = model.weights
    dtype = str(weights.layers[0].attention.qkv.dtype).removeprefix("torch.")
    form = "int8" if any(layer.mlp.down.form == "int8" for layer in weights.layers) else dtype
    check_conditions(manifest.conditions, dtype=form, dims=model.dims)
    libraries = build_pack(folder, manifest, build_folder or default_build_folder())
    store = WeightStore()
    ops: dict[str, Callable[..., Any]] = {}
    with torch.inference_mode():
        # of several kernels for one op the manifest's last is asked first, and base's op at the end
        for entry, library in zip(manifest.kernels, libraries, strict=True):
            op = make_op(NativeKernel(library), entry, ops.get(entry.op) or base.unbound(entry.op))
            op.prepare(weights, store)
            ops[entry.op] = op
    return base.replace(source=pack_id, **ops)


def read_manifest(folder: Path) -> tuple[PackManifest, str]:
    """What the pack says of itself, and its id: the digest of that. Raises PackError."""
    path = folder / MANIFEST
    try:
        body = path.read_bytes()
        manifest = msgspec.json.decode(body, type=PackManifest)
    except OSError as error:
        raise PackError(f"{folder} is no pack: {error.strerror}", hint=f"a pack has a {MANIFEST}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PackError(f"{path}: {error}") from None
    if manifest.format != FORMAT or manifest.kind != "kernels":
        raise PackError(
            f"{path}: format {manifest.format} of kind {manifest.kind!r}; "
            f"this version reads format {FORMAT} of kind 'kernels'"
        )
    if not manifest.kernels:
        raise PackError(f"{path} holds no kernels")
    return manifest, hashlib.sha256(body).hexdigest()


def check_conditions(conditions: PackConditions, *, dtype: str, dims: Mapping[str, int]) -> None:
    """Raises PackError that says what the pack was made for and what is here.

    ``dtype`` is that of the model's weights (int8 when they are quantized so), ``dims`` its DecoderShape.
    """
    if conditions.device != "cpu":
        raise PackError(f"the pack is for device {conditions.device}, its kernels run on cpu here")
    missing = sorted(set(conditions.cpu_features) - cpu_features())
    if missing:
        raise PackError(
            f"the pack needs CPU features that are not here: {', '.join(missing)} ({platform.machine()})"
        )
    if conditions.dtype != dtype:
        raise PackError(
            f"the pack is for {conditions.dtype} weights, the model's are {dtype}",
            hint=f"serve the model with --dtype {conditions.dtype} and without quantization",
        )
    for name, needed in conditions.shapes.items():
        if dims.get(name) != needed:
            raise PackError(
                f"the pack is for a model whose {name} is {needed}, "
                f"this model's is {dims.get(name, 'unknown')}"
            )


def build_pack(folder: Path, manifest: PackManifest, build_folder: Path) -> list[Path]:
    """A library for each of the manifest's kernels, in order. Checks every file's digest first.

    Raises PackError and its children.
    """
    contents = {name: _read_checked(folder, name, digest) for name, digest in manifest.files.items()}
    for entry in manifest.kernels:
        if entry.source not in contents:
            raise PackError(f"the pack's manifest has no file {entry.source!r}, its source for {entry.op}")
    try:
        build_folder.mkdir(parents=True, exist_ok=True)
        # what is compiled is what was checked, whatever happens to the folder meanwhile
        copy = Path(tempfile.mkdtemp(prefix=".pack-", dir=build_folder))
    except OSError as error:
        raise PackError(
            f"kernels cannot be built in {build_folder}: {error.strerror}", hint="set XDG_CACHE_HOME"
        ) from None
    try:
        for name, content in contents.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
        return [_build(copy, entry, build_folder) for entry in manifest.kernels]
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def default_build_folder() -> Path:
    """$XDG_CACHE_HOME/headrace/kernels, or the same below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "headrace" / "kernels"


def _build(copy: Path, entry: KernelEntry, build_folder: Path) -> Path:
    return compile_kernel(copy / entry.source, entry.flags, build_folder)


def _read_checked(folder: Path, name: str, digest: str) -> bytes:
    path, pure = folder / name, PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise PackError(f"the pack's manifest names {name!r}, which is no path inside the pack")
    try:
        if path.is_symlink() or not path.is_file():
            raise PackError(f"the pack's file {name} is missing, or no plain file")
        content = path.read_bytes()
    except OSError as error:
        raise PackError(f"the pack's file {name} cannot be read: {error.strerror}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise PackError(
            f"the pack's file {name} is not the one that was judged: "
            f"its digest is {found[:12]}…, the manifest says {digest[:12]}…"
        )
    return content
