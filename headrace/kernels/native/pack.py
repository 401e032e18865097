"""From a pack's folder to a table in which its kernels run.

    check    the pack's files are those of its manifest, this machine and model are those it was made for
    build    each source, from a private copy of what was checked (build_cache.py)
    bind     each kernel to the model's weights, packed as it likes (op.py)

Nothing of the model or of the table in use changes, so this may run in a thread beside the step loop.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from headrace.core.errors import NothingCoveredError, PackError
from headrace.core.files import read_regular
from headrace.core.packs import KernelEntry, PackConditions, PackManifest
from headrace.core.signatures import MAX_BYTES
from headrace.kernels import stock
from headrace.kernels.native.build import cpu_features
from headrace.kernels.native.build_cache import built
from headrace.kernels.native.op import NativeKernel, NativeOp, make_op
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
    kernels' forms of the weights take. A kernel that covers none of the weights is left out.

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
    with built(folder, manifest, build_folder) as libraries:
        return bind_kernels(manifest.kernels, libraries, base, weights, source=pack_id)


def bind_kernels(
    entries: Sequence[KernelEntry],
    libraries: Sequence[Path],
    base: OpTable,
    weights: DecoderWeights,
    *,
    source: str,
) -> OpTable:
    """``base`` with a native op for each entry, from its library. Raises PackError when none of them covers
    any of the weights."""
    store = WeightStore()
    ops: dict[str, Callable[..., Any]] = {}
    uncovered: list[PackError] = []
    with torch.inference_mode():
        # of several kernels for one op the last is asked first, and base's op at the end
        for entry, library in zip(entries, libraries, strict=True):
            op = make_op(NativeKernel(library), entry, ops.get(entry.op) or base.unbound(entry.op))
            try:
                op.prepare(weights, store)
            except NothingCoveredError as error:
                uncovered.append(error)
            else:
                ops[entry.op] = op
    if not ops:
        raise uncovered[0]
    layer = ops.get("decoder_layer")
    if isinstance(layer, NativeOp) and layer.entry.batch_invariant:
        # a dtype that depends on how many rows a step has would make a row depend on it too
        ops["embedding"] = stock.embedding_float32
    return base.replace(source=source, **ops)


def read_manifest(folder: Path) -> tuple[PackManifest, str]:
    """What the pack says of itself, and its id: the digest of that. Raises PackError."""
    path = folder / MANIFEST
    try:
        body = read_regular(path, MAX_BYTES)
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
