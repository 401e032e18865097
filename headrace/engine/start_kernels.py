"""Which kernels an engine starts with: what its setting says, or the best shipped pack that fits.

    choose ──► a pack that this CPU runs and this compiler builds ──► its weight formats ──► load_model
    bind   ──► its kernels on the loaded weights, tried on a few tokens; else the next pack, else stock

Left to itself (``auto``) this never fails: what cannot be used is passed over, and ``line`` says why.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from headrace.core.errors import CompilerMissingError, HeadraceError, PackError
from headrace.core.packs import AUTO, NONE, PackManifest
from headrace.core.signatures import PROJECT_KEYS
from headrace.engine.model_runner import KVGeometry
from headrace.engine.packs import LoadPack, load_native_pack, pack_id_of
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.table import OpTable
from headrace.models.causal_lm import CausalLM
from headrace.models.families import covers
from headrace.models.fields import read_json

if TYPE_CHECKING:
    from headrace.kernels.native.shipped import ShippedPack

log = logging.getLogger("headrace.engine")

BUILD_S = 300.0
"""How long kernels may be built at a start, those of all packs that are tried together."""

Found = TypeVar("Found")

_BLOCK = 16


@dataclass(frozen=True)
class Shipped:
    """Where packs lie that need not be named; ``folder`` None: beside the package."""

    folder: Path | None = None
    keys: Path = PROJECT_KEYS
    build_s: float = BUILD_S


@dataclass(frozen=True)
class Started:
    """``pack_id`` and ``folder`` are empty where stock operators run. ``line`` is for the operator."""

    ops: OpTable
    pack_id: str
    folder: str
    line: str
    batch_invariant: bool

    def reads_alone(self, model: CausalLM) -> bool:
        """Whether its kernels read all matrices of the model, and stock operators none."""
        from headrace.kernels.native.coverage import computes_steps
        from headrace.kernels.native.pack import Packable

        return isinstance(model, Packable) and computes_steps(self.ops, model.weights)


class StartKernels:
    """One engine's choice: a context manager, as what is built may lie in a temporary folder until it is
    bound. ``load`` is what loads a pack that was named."""

    def __init__(
        self, setting: str, *, dtype: torch.dtype, device: torch.device, shipped: Shipped, load: LoadPack
    ) -> None:
        self._setting = setting
        self._shipped = shipped
        self._load = load
        self._dtype = str(dtype).removeprefix("torch.")
        self._device = device
        self._candidates: list[ShippedPack] = []  # the best first
        self._reasons: list[str] = []
        self._deadline = 0.0
        self._held = contextlib.ExitStack()
        self._built: dict[str, Path] = {}  # folder of its libraries by pack id

    def __enter__(self) -> StartKernels:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def choose(self, model_folder: Path) -> frozenset[str]:
        """The formats of weights that the chosen kernels read in every step; none: weights are to be held as
        stock operators like them.

        Raises PackError where a folder was named that is no pack.
        """
        raw = read_json(model_folder / "config.json")
        if self._setting == NONE:
            return frozenset()
        if self._setting != AUTO:
            return _formats_of(Path(self._setting))
        if not covers(raw):
            kind = raw.get("model_type")
            self._reasons = [f"{kind} runs on Transformers' definition, and packs are for Headrace's own"]
        elif self._device.type != "cpu":
            self._reasons = [f"packs are for CPUs, and the model runs on {self._device.type}"]
        else:
            self._find()
        self._deadline = time.monotonic() + self._shipped.build_s
        while self._candidates:
            chosen = self._candidates[0]
            if self._try(chosen, partial(self._build, chosen)) is not None:
                return _formats_of(chosen.folder)
        return frozenset()

    def bind(self, model: CausalLM) -> Started:
        """The ops to start with. Raises PackError for a pack that was named and does not fit."""
        own = model.ops
        if self._setting == NONE:
            return Started(own, "", "", "kernels: stock operators, as --pack none asks for", False)
        if self._setting != AUTO:
            folder = Path(self._setting)
            pack_id = pack_id_of(folder)
            ops = self._load(folder, own, model)
            words, invariant = describe_kernels(own, ops, model)
            return Started(ops, pack_id, str(folder), f"kernels: pack {pack_id[:12]} ({words})", invariant)
        while self._candidates:
            chosen = self._candidates[0]
            found = self._try(chosen, partial(self._bind, chosen, own, model))
            if found is not None:
                words, invariant = describe_kernels(own, found, model)
                line = "; ".join([f"kernels: {chosen.name} ({words})", *self._reasons])
                return Started(found, chosen.pack_id, str(chosen.folder), line, invariant)
        reasons = "; ".join(self._reasons) or "none ships with this installation"
        return Started(own, "", "", f"kernels: stock operators: {reasons}", False)

    def _find(self) -> None:
        # imported here, and below, because an engine without packs does without
        from headrace.kernels.native.shipped import find_shipped, shipped_folder

        try:
            found, self._reasons = find_shipped(self._shipped.folder or shipped_folder(), self._shipped.keys)
        except HeadraceError as error:  # the project's own keys are damaged
            self._reasons = [error.message]
            return
        for pack in found:
            wanted = pack.manifest.conditions.dtype
            if wanted == self._dtype:
                self._candidates.append(pack)
            else:
                self._reasons.append(f"{pack.name}: it is for {wanted}, the model is loaded as {self._dtype}")

    def _build(self, pack: ShippedPack) -> Path:
        from headrace.kernels.native.build_cache import built

        left = max(1.0, self._deadline - time.monotonic())
        libraries = self._held.enter_context(built(pack.folder, pack.manifest, timeout_s=left))
        self._built[pack.pack_id] = libraries[0].parent
        return libraries[0].parent

    def _bind(self, pack: ShippedPack, own: OpTable, model: CausalLM) -> OpTable:
        folder = self._built.get(pack.pack_id) or self._build(pack)
        ops = load_native_pack(pack.folder, own, model, folder)
        _try_out(ops, model, getattr(torch, self._dtype))
        return ops

    def _try(self, pack: ShippedPack, do: Callable[[], Found]) -> Found | None:
        """What ``do`` gives; None: it failed, and the pack is passed over."""
        try:
            return do()
        except CompilerMissingError as error:
            self._candidates.clear()  # as good as none
            self._reasons = [f"{error.message} ({error.hint})"]
        except HeadraceError as error:
            # of what a compiler says, the first error
            self._pass_over(pack, " ".join(error.message.splitlines()[:2]))
            log.warning("pack %s cannot be used: %s", pack.name, error.message)
            if time.monotonic() >= self._deadline:
                self._candidates.clear()
        except Exception as error:
            log.exception("pack %s cannot be used", pack.name)
            self._pass_over(pack, f"{type(error).__name__}: {error}")
        return None

    def _pass_over(self, pack: ShippedPack, reason: str) -> None:
        self._candidates.remove(pack)
        self._reasons.append(f"{pack.name}: {reason}")


def _try_out(ops: OpTable, model: CausalLM, dtype: torch.dtype) -> None:
    """A prompt of two tokens and a decode. Raises PackError where no numbers come out of them, and whatever
    the kernels raise."""
    geometry = KVGeometry(list(model.config.kv_specs), _BLOCK, dtype)
    own, model.ops = model.ops, ops
    try:
        with torch.inference_mode():
            kv = geometry.allocate(1, torch.device("cpu"))
            for context, count in ((0, 2), (2, 1)):
                batch = AttentionBatch.build([BatchEntry(context, count, [0])], _BLOCK)
                hidden = model.forward(torch.zeros(count, dtype=torch.int64), batch, kv)
                if not bool(model.logits(hidden).isfinite().all()):
                    raise PackError("its kernels give no valid logits for this model")
    finally:
        model.ops = own


def describe_kernels(own: OpTable, ops: OpTable, model: CausalLM) -> tuple[str, bool]:
    """The ops that are not the engine's own; whether they promise the same bits in any batch."""
    from headrace.kernels.native.coverage import describe_coverage, is_batch_invariant, native_ops
    from headrace.kernels.native.pack import Packable

    if isinstance(model, Packable) and native_ops(ops):
        invariant = is_batch_invariant(ops, model.weights)
        words = describe_coverage(ops, model.weights)
        return f"{words}: the same bits in any batch" if invariant else words, invariant
    before, now = own.provenance, ops.provenance
    return ", ".join(name for name in now if now[name] != before[name]) or "nothing", False


def _formats_of(folder: Path) -> frozenset[str]:
    """The formats of weights with which a pack computes every step; none: it leaves steps to other operators,
    and weights are held as those like them."""
    try:
        body = (folder / "pack.json").read_bytes()
    except OSError as error:
        raise PackError(f"{folder} is no pack: {error}", hint="`headrace packs list` shows them") from None
    try:
        return msgspec.json.decode(body, type=PackManifest).step_formats
    except (msgspec.DecodeError, UnicodeDecodeError):
        return frozenset()  # whoever loads it says what is wrong
