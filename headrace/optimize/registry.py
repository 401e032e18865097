"""Where packs are published: a folder, or any place that fsspec knows (s3://…, gs://…, memory://…).

    <root>/packs/<id>/…        a pack; it exists from the moment its signature.json is there
    <root>/audit.jsonl         who published, rolled out or took back what, one JSON object a line

Nothing in a registry is trusted: ``fetch`` checks signature, files and evidence before it hands out a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from headrace.core.errors import NotFoundError, PackError, UnavailableError, UsageError
from headrace.core.packs import PackManifest
from headrace.models.cache import cache_folder
from headrace.optimize.keys import Keys
from headrace.optimize.packing import MANIFEST, SIGNATURE, pack_id, verify_pack
from headrace.optimize.rounds import data_folder

AUDIT = "audit.jsonl"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log."""

    at: str
    action: str  # published, rolled_out, rolled_back, refused
    pack: str
    approver: str
    detail: str = ""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A pack as the registry lists it; ``manifest`` is what it says of itself, unchecked."""

    id: str
    manifest: PackManifest


class Registry:
    """``url`` is a path or an fsspec URL; empty: the default folder."""

    def __init__(self, url: str = "", *, keys: Keys | None = None, **storage: Any) -> None:
        self.url = url or str(default_registry())
        self.keys = keys or Keys()
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **storage)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"--registry {self.url}: {error}", hint="a folder, or a URL that fsspec can open"
            ) from error
        if self._local is not None and self._local.exists() and not self._local.is_dir():
            raise UsageError(
                f"--registry {self.url} is a file",
                hint="a registry is a folder, or a URL that fsspec can open",
            )

    @property
    def _local(self) -> Path | None:
        return Path(self._root) if isinstance(self._fs, LocalFileSystem) else None

    def publish(self, folder: Path, *, approver: str) -> str:
        """Copies a pack in; whole or not at all. Returns its id. Raises PackError for one that does not
        hold, UnavailableError where the registry cannot be written."""
        manifest = verify_pack(folder, self.keys)
        identity = pack_id(folder)
        with self._reached():
            if not self._fs.exists(self._path(identity, SIGNATURE)):
                self._copy_in(folder, identity, list(manifest.files))
        self.record("published", identity, approver, manifest.summary)
        return identity

    def fetch(self, identity: str) -> Path:
        """The folder of a pack, checked: in the registry where that is a folder, else a copy in the cache.

        Raises PackError for one whose signature, files or evidence do not hold, NotFoundError.
        """
        if self._local is not None:
            folder = self._local / "packs" / identity
            if not (folder / SIGNATURE).exists():
                raise self._missing(identity)
        else:
            folder = cache_folder() / "packs" / identity
            if not folder.exists():
                self._copy_out(identity, folder)
        verify_pack(folder, self.keys)
        if pack_id(folder) != identity:
            raise PackError(f"pack {identity[:12]}: its pack.json is another's (id {pack_id(folder)[:12]})")
        return folder

    def packs(self) -> list[Listed]:
        """Oldest first; what cannot be read is left out, ``fetch`` says why."""
        with self._reached():
            base = self._path()
            if not self._fs.exists(base):
                return []
            names = sorted(PurePosixPath(path).name for path in self._fs.ls(base, detail=False))
            found = []
            for name in names:
                if name.startswith(".") or not self._fs.exists(self._path(name, SIGNATURE)):
                    continue
                with contextlib.suppress(msgspec.MsgspecError, FileNotFoundError):
                    body = self._fs.cat_file(self._path(name, MANIFEST))
                    found.append(Listed(id=name, manifest=msgspec.json.decode(body, type=PackManifest)))
        return sorted(found, key=lambda one: (one.manifest.created, one.id))

    def find(self, prefix: str) -> Listed:
        """The only pack whose id begins so, or whose name is this; ``latest``: the newest."""
        packs = self.packs()
        if prefix == "latest" and packs:
            return packs[-1]
        found = [one for one in packs if one.id.startswith(prefix) or one.manifest.name == prefix]
        if len(found) == 1 and prefix:
            return found[0]
        what = "several packs are" if found else "no pack is"
        raise NotFoundError(
            f"{what} called {prefix!r} in {self.url}", hint="`headrace packs list` lists them"
        )

    def record(self, action: str, pack: str, approver: str, detail: str = "") -> None:
        """Adds a line to the audit log."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = Event(at=now, action=action, pack=pack, approver=approver, detail=detail)
        line = msgspec.json.encode(event) + b"\n"
        with self._reached():
            if self._local is not None:
                self._local.mkdir(parents=True, exist_ok=True)
                with (self._local / AUDIT).open("ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    file.write(line)
                return
            path = f"{self._root}/{AUDIT}"  # object stores cannot append
            before = self._fs.cat_file(path) if self._fs.exists(path) else b""
            self._fs.pipe_file(path, before + line)

    def audit(self) -> list[Event]:
        """The audit log, oldest first; a line cut short by a crash is passed over."""
        path = f"{self._root}/{AUDIT}"
        with self._reached():
            body: bytes = self._fs.cat_file(path) if self._fs.exists(path) else b""
        events = []
        for line in body.splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                events.append(msgspec.json.decode(line, type=Event))
        return events

    def _copy_in(self, folder: Path, identity: str, files: list[str]) -> None:
        if self._local is not None:
            packs = self._local / "packs"
            packs.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=packs))
            try:
                shutil.copytree(folder, partial, dirs_exist_ok=True)
                partial.chmod(0o755)
                with contextlib.suppress(FileExistsError):
                    partial.rename(packs / identity)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return
        for relative in (*files, MANIFEST, SIGNATURE):  # the signature last: with it the pack exists
            self._fs.pipe_file(self._path(identity, relative), (folder / relative).read_bytes())

    def _copy_out(self, identity: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        base = self._path(identity)
        try:
            with self._reached():
                if not self._fs.exists(self._path(identity, SIGNATURE)):
                    raise self._missing(identity)
                for path in self._fs.find(base):
                    relative = PurePosixPath(path).relative_to(PurePosixPath(base))
                    if ".." in relative.parts:
                        raise PackError(f"pack {identity[:12]}: {path} is outside of it")
                    (partial / relative).parent.mkdir(parents=True, exist_ok=True)
                    (partial / relative).write_bytes(self._fs.cat_file(path))
            verify_pack(partial, self.keys)
            with contextlib.suppress(OSError):  # another process was faster
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), "packs", *parts))

    def _missing(self, identity: str) -> NotFoundError:
        return NotFoundError(
            f"no pack {identity[:12]} in {self.url}", hint="`headrace packs list` lists them"
        )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(
                f"the registry {self.url} cannot be used: {error}", hint="look at --registry and its access"
            ) from error


def verify(folder: Path) -> str:
    """The id of the pack in ``folder``, once its signature, files and evidence hold against this user's
    trusted keys. Raises PackError. What a server calls before its replicas build anything."""
    verify_pack(folder)
    return pack_id(folder)


def default_registry() -> Path:
    """The registry that is used when none is named."""
    return data_folder() / "registry"


def current_user() -> str:
    """Who approves, when nobody is named."""
    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return f"uid {os.getuid()}"
