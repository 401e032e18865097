"""Which packs the local replicas of each model run, and what they ran before.

A pack is copied into the server's own folder before it is verified, so that what was verified is what
replicas build, now and when they are restarted.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.core.errors import InvalidRequestError, NotFoundError, PackError
from headrace.core.knobs import EngineConfig
from headrace.core.messages import Hello
from headrace.core.packs import NONE, explicit_pack

VerifyPack = Callable[[Path], str]
"""The id of the pack in a folder, once its signature, files and evidence hold. Raises PackError."""


@dataclass(frozen=True)
class Pack:
    """No pack at all is one with an empty id. ``chosen_by`` is what processes are told instead of the folder:
    ``auto`` for one that they find by themselves."""

    pack_id: str = ""
    folder: str = ""
    chosen_by: str = ""

    @property
    def setting(self) -> str:
        """What a process that is to run it is told as ``EngineConfig.pack``."""
        return self.chosen_by or self.folder or NONE

    def __str__(self) -> str:
        return f"pack {self.pack_id[:12]}" if self.pack_id else "no pack"


def first_pack(setting: str, hellos: Sequence[Hello]) -> Pack:
    """What replicas started with that were told this setting, by what they say of themselves."""
    chosen_by = "" if explicit_pack(setting) else setting
    for hello in hellos:
        if hello.pack:
            return Pack(hello.pack, hello.pack_folder, chosen_by)
    return Pack(chosen_by=chosen_by)


class PackHistory:
    """Packs by model's name, in the order of their roll-outs."""

    def __init__(self, folder: Path, verify: VerifyPack | None) -> None:
        """Copies lie under ``folder``; ``verify`` None: no pack is trusted."""
        self._folder = folder
        self._verify = verify
        self._packs: dict[str, list[Pack]] = {}

    def engine(self, model: str, planned: EngineConfig) -> EngineConfig:
        """What a new process is told: as planned, but for the pack, if one was rolled out."""
        packs = self._packs.get(model, [])
        return planned if len(packs) < 2 else msgspec.structs.replace(planned, pack=packs[-1].setting)

    def current(self, model: str, first: Pack) -> Pack:
        """What a model's replicas are to run; ``first`` is what they started with, before any roll-out."""
        return self._of(model, first)[-1]

    def previous(self, model: str, first: Pack) -> Pack:
        """What ran before the last roll-out. Raises InvalidRequestError where there was none."""
        packs = self._of(model, first)
        if len(packs) < 2:
            raise InvalidRequestError(f"nothing was rolled out to {model} that could be taken back")
        return packs[-2]

    def rolled_out(self, model: str, pack: Pack) -> None:
        self._packs[model].append(pack)

    def rolled_back(self, model: str) -> None:
        self._packs[model].pop()

    def admit(self, folder: Path) -> Pack:
        """A verified copy of the pack in ``folder``. Raises PackError or NotFoundError."""
        if not (folder / "pack.json").is_file():
            raise NotFoundError(f"{folder} is no pack: it has no pack.json")
        if self._verify is None:
            raise PackError("this server has no key to verify packs with")
        found = _digest(folder)
        copy = self._folder / found[:32]
        if not copy.exists():
            shutil.copytree(folder, copy, symlinks=True)
        try:
            return Pack(self._verify(copy), str(copy))
        except PackError:
            shutil.rmtree(copy, ignore_errors=True)
            raise

    def _of(self, model: str, first: Pack) -> list[Pack]:
        return self._packs.setdefault(model, [first])


def _digest(folder: Path) -> str:
    try:
        return hashlib.sha256((folder / "pack.json").read_bytes()).hexdigest()
    except OSError as error:
        raise PackError(f"{folder} is no pack: {error}") from error
