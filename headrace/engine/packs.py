"""The op tables that an engine can run: its own, and those of packs, prepared beside the step loop.

    prepare ──► thread: build, lay out weights ──► take ──► Engine.use_pack, between two steps ──► retire

A table that nobody runs costs memory alone: the live one is not touched until the flip.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from headrace.core.errors import EngineError, HeadraceError, InvalidRequestError, NotFoundError, PackError
from headrace.core.files import read_regular
from headrace.core.messages import Failed, PackFailed, PackReady
from headrace.core.signatures import MAX_BYTES
from headrace.kernels.table import OpTable
from headrace.models.causal_lm import CausalLM

log = logging.getLogger("headrace.engine")

LoadPack = Callable[[Path, OpTable, CausalLM], OpTable]
"""A table in which the kernels of the pack in a folder replace those of the given one, for that model.
Raises PackError. Called in a thread beside the step loop."""

# A build must not take the cores from who is being served: compilers inherit it.
_NICENESS = 19


class Packs:
    """Tables by pack id; the engine's own is under the empty id. ``active`` is the one in use.

    Called from the engine's thread alone; ``wake`` is called from another one.
    """

    def __init__(self, model: CausalLM, load: LoadPack, wake: Callable[[], None]) -> None:
        self.active = ""
        self._model = model
        self._own = model.ops
        self._load = load
        self._wake = wake
        self._tables = {"": self._own}
        self._preparing: set[str] = set()
        self._done: deque[tuple[str, OpTable | HeadraceError, float]] = deque()

    def start_with(self, ops: OpTable, pack_id: str) -> None:
        """Makes the table of a pack (empty: the engine's own) the active one, before the first step."""
        self._tables[pack_id] = self._model.ops = ops
        self.active = pack_id

    def prepare(self, pack_id: str, folder: Path) -> None:
        """Begins to load a pack; ``take`` tells when it is done. Raises InvalidRequestError."""
        if not pack_id or pack_id in self._preparing:
            raise InvalidRequestError(f"pack {pack_id[:12]!r} is being prepared already", param="pack_id")
        self._preparing.add(pack_id)
        # A daemon: who leaves meanwhile does not wait for a compiler.
        threading.Thread(
            target=self._prepare, args=(pack_id, folder), name=f"prepare {pack_id[:12]}", daemon=True
        ).start()

    def take(self) -> list[tuple[str, PackReady | PackFailed]]:
        """Packs whose preparation has ended since the last call."""
        ended: list[tuple[str, PackReady | PackFailed]] = []
        while self._done:
            pack_id, result, seconds = self._done.popleft()
            self._preparing.discard(pack_id)
            if isinstance(result, OpTable):
                # One in use stays: what runs may point into it.
                self._tables.setdefault(pack_id, result)
                ended.append((pack_id, PackReady(pack_id, seconds)))
            else:
                ended.append((pack_id, PackFailed(Failed.of_error("", result))))
        return ended

    def table(self, pack_id: str) -> OpTable:
        """Raises NotFoundError for one that is not prepared."""
        table = self._tables.get(pack_id)
        if table is None:
            raise NotFoundError(f"pack {pack_id[:12]} is not prepared here")
        return table

    def retire(self, pack_id: str) -> None:
        """Gives back what a pack holds. Raises InvalidRequestError for the one in use."""
        if pack_id == self.active:
            raise InvalidRequestError(f"pack {pack_id[:12]} is in use", param="pack_id")
        if pack_id and self._tables.pop(pack_id, None) is not None:
            gc.collect()  # a table and its composites refer to each other

    def drop(self, pack_id: str) -> None:
        """As ``retire``; the one in use stays."""
        if pack_id != self.active:
            self.retire(pack_id)

    def _prepare(self, pack_id: str, folder: Path) -> None:
        started = time.monotonic()
        result: OpTable | HeadraceError
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            found = pack_id_of(folder)
            if found != pack_id:
                raise PackError(f"{folder} holds pack {found[:12]}, not {pack_id[:12]}")
            result = self._load(folder, self._own, self._model)
        except HeadraceError as error:
            result = error
        except Exception as error:
            log.exception("pack %s could not be prepared", pack_id[:12])
            result = EngineError(f"it could not be prepared: {type(error).__name__}: {error}")
        self._done.append((pack_id, result, time.monotonic() - started))
        self._wake()


def load_native_pack(
    folder: Path, ops: OpTable, model: CausalLM, build_folder: Path | None = None
) -> OpTable:
    """Compiles the pack's kernels on this machine, into ``build_folder`` (default: the user's cache). Raises
    PackError."""
    # imported here because few engines start with a pack
    from headrace.kernels.native.pack import load_pack

    return load_pack(folder, ops, model, build_folder=build_folder)


def pack_id_of(folder: Path) -> str:
    """The digest of the pack's manifest. Raises PackError where there is none."""
    try:
        return hashlib.sha256(read_regular(folder / "pack.json", MAX_BYTES)).hexdigest()
    except OSError as error:
        raise PackError(
            f"{folder} is no pack: pack.json: {error.strerror}", hint="`headrace packs list` shows them"
        ) from error
