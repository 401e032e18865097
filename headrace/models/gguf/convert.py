"""A GGUF file made into a model folder, once, on disk.

converted/<sha256 of the file>-<form>-v<CONVERTER_VERSION>/      form: bfloat16, float32, or blocks
    config.json  model.safetensors  generation_config.json
    tokenizer.json  tokenizer_config.json  chat_template.jinja
    headrace.json        what it was made of; the folder counts only when sizes match it

Folders of plain numbers are read by our loader, Transformers and vLLM; with blocks, which keep quantized
weights as the file has them, only by ours. A file without quantized weights gets no folder of blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from headrace.core.errors import CorruptFileError, ModelNotFoundError
from headrace.models.cache import (
    Progress,
    cache_folder,
    file_digest,
    locked,
    new_folder,
    no_progress,
    read_record,
    write_json,
)
from headrace.models.gguf.config import MappedModel, map_model
from headrace.models.gguf.reader import read_gguf, shard_paths
from headrace.models.gguf.safetensors_plan import SafetensorsPlan, write_safetensors
from headrace.models.gguf.tokenizer import MappedTokenizer, map_tokenizer

CONVERTER_VERSION = 1
BLOCKS = "blocks"


def converted_folder(
    path: Path, *, dtype: str, blocks: bool = False, progress: Progress = no_progress
) -> Path:
    """The model folder for a GGUF file, made now unless it was made before.

    ``dtype`` is "bfloat16" or "float32". ``blocks``: quantized weights stay as they are, and ``dtype`` is
    that of the others. Raises what ``read_gguf``, ``map_model`` and ``map_tokenizer`` raise, and StartupError
    where the cache has no room.
    """
    digest = gguf_digest(path, progress)
    return folder_for_digest(digest, dtype, blocks=blocks) or _convert(path, digest, dtype, blocks, progress)


def gguf_digest(path: Path, progress: Progress = no_progress) -> str:
    """SHA-256 that names a GGUF file, or all shards of a split one together."""
    shards = shard_paths(path)
    for shard in shards:
        _check_start(shard)
    digests = [file_digest(shard, progress) for shard in shards]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _check_start(path: Path) -> None:
    """Tells a missing or wrong file before anything hashes gigabytes of it."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    if start != b"GGUF":
        raise CorruptFileError(
            f"{path}: a GGUF file starts with b'GGUF', this with {start!r}",
            hint="The file is damaged, half downloaded, or something else: fetch it again.",
        )


def folder_for_digest(digest: str, dtype: str, *, blocks: bool = False) -> Path | None:
    """The complete converted folder of a file with that SHA-256, if there is one."""
    if not blocks:
        return _complete(digest, dtype)[0]
    folder = _complete(digest, BLOCKS)[0]
    if folder is None:
        plain, record = _complete(digest, dtype)
        folder = plain if record.get("quantized") is False else None
    return folder


def _complete(digest: str, form: str) -> tuple[Path | None, dict[str, Any]]:
    """A folder, None when it is not complete, and what it says of itself."""
    folder = _target(digest, form)
    record = read_record(folder / "headrace.json")
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return None, {}
    with contextlib.suppress(OSError):
        if all((folder / name).stat().st_size == size for name, size in record["files"].items()):
            return folder, record
    return None, {}


def _target(digest: str, form: str) -> Path:
    return cache_folder() / "converted" / f"{digest}-{form}-v{CONVERTER_VERSION}"


def _convert(path: Path, digest: str, dtype: str, blocks: bool, progress: Progress) -> Path:
    target = _target(digest, BLOCKS if blocks else dtype)
    with locked(target.name):
        made = folder_for_digest(digest, dtype, blocks=blocks)  # by another process, while this one waited
        if made is not None:
            return made
        file = read_gguf(path)
        model = map_model(file)
        quantized = any(SafetensorsPlan.is_quantized(source) for source in model.weights)
        if blocks and not quantized:
            return _complete(digest, dtype)[0] or _convert(path, digest, dtype, False, progress)
        tokenizer = map_tokenizer(file, model.config["vocab_size"])
        plan = SafetensorsPlan.of(model.weights, dtype, blocks=blocks)
        with new_folder(target, needed_bytes=plan.file_bytes + (64 << 20)) as folder:
            write_safetensors(folder / "model.safetensors", plan, progress)
            _write_texts(folder, model, tokenizer, dtype)
            record = {
                "source": str(path.resolve()),
                "sha256": digest,
                "dtype": dtype,
                "quantized": quantized,
                "converter_version": CONVERTER_VERSION,
                "revision": target.name,
                "files": {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())},
            }
            write_json(folder / "headrace.json", record)
    return target


def _write_texts(folder: Path, model: MappedModel, tokenizer: MappedTokenizer, dtype: str) -> None:
    eos = tokenizer.eos_token_ids
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = model.config | ids | {"eos_token_id": eos[0] if eos else None, "torch_dtype": dtype}
    generation = {name: value for name, value in ids.items() if value is not None}
    if eos:
        generation["eos_token_id"] = eos
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer_config.json", tokenizer.tokenizer_config)
    text = json.dumps(tokenizer.tokenizer, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, "utf-8")
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")
