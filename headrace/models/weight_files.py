"""Which files of a model folder together hold every tensor. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from headrace.models.fields import Fields, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_AGAIN = "download the model again; a folder in the Hugging Face cache is completed by the same command"


def weight_files(folder: Path) -> list[Path]:
    """In the index's order of names, or the one file there is; all of them exist.

    Raises ModelNotFoundError when any is missing, UnsupportedModelError when the weights have another
    format, CorruptFileError for an index that is damaged or leads out of the folder.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder", hint="check the model's path or name")
    index = folder / INDEX_NAME
    if index.exists():
        names = _indexed_names(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelNotFoundError(
                f"{folder} is incomplete: {len(missing)} of {len(names)} weight files are missing, "
                f"among them {missing[0]}",
                hint=_AGAIN,
            )
        return [folder / name for name in names]
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    partial = sorted(path.name for path in folder.glob("*.incomplete"))
    if partial:
        raise ModelNotFoundError(f"{folder} is half downloaded: {partial[0]}", hint=_AGAIN)
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise ModelNotFoundError(f"{folder} holds {shards[0]} but no {INDEX_NAME}", hint=_AGAIN)
    others = sorted(path.name for path in folder.glob("*.bin")) + sorted(
        path.name for path in folder.glob("*.pt*")
    )
    if others:
        raise UnsupportedModelError(
            f"{folder} holds its weights as {others[0]}; safetensors are needed",
            hint="such files can run code when read; convert them with Transformers' save_pretrained",
        )
    raise ModelNotFoundError(f"{folder} holds no {SINGLE_NAME}", hint=_AGAIN)


def _indexed_names(index: Path) -> list[str]:
    weight_map = Fields(read_json(index), str(index)).mapping("weight_map")
    names = sorted(set(map(str, weight_map.values())))
    if not names:
        raise CorruptFileError(f"{index} names no weight files", hint=_AGAIN)
    for name in names:
        # an index must not lead out of its folder
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptFileError(f"{index} names {name[:100]!r}, a safetensors file beside it is needed")
    return names


def joined_name(names: Sequence[str]) -> str:
    """Under what a converted file holds several matrices in one buffer of blocks: their names, which differ
    in the part before ``.weight`` alone, as one: ``….q_proj+k_proj+v_proj.weight``."""
    heads = [name.removesuffix(".weight").rpartition(".") for name in names]
    assert len({head[0] for head in heads}) == 1, names
    return f"{heads[0][0]}.{'+'.join(head[2] for head in heads)}.weight".lstrip(".")
