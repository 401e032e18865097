"""From a model folder to a model that can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import InsufficientMemoryError, UnsupportedModelError
from headrace.kernels.table import OpTable
from headrace.models.assemble import LoadProgress, assemble_decoder
from headrace.models.causal_lm import CausalLM
from headrace.models.families import covers, read_config
from headrace.models.family_fields import refuse_quantized
from headrace.models.fields import Fields, read_json
from headrace.models.weights import Checkpoint, weights_revision


@dataclass(frozen=True)
class LoadedModel:
    """``eos_token_ids`` end a reply; ``revision`` names the weights for block identity;
    ``weights_bytes`` is the memory they take; ``notes`` are for the operator to read."""

    model: CausalLM
    eos_token_ids: list[int]
    revision: str
    weights_bytes: int
    notes: list[str]


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    revision: str = "",
    progress: LoadProgress | None = None,
    free_bytes: int | None = None,
) -> LoadedModel:
    """Loads a folder in the Hugging Face layout: our decoder if it covers the family, else Transformers'
    definition with our attention.

    ``quantization`` is "none" or "int8"; ``revision`` is what names the weights, empty: a digest of them;
    ``progress`` gets bytes done and bytes in all; ``free_bytes`` is the memory there is, None: enough.
    Raises InsufficientMemoryError when the weights do not fit in it,
    ModelNotFoundError for missing files, CorruptFileError for damaged ones, UnsupportedModelError for
    a model that cannot be run faithfully.
    """
    raw = read_json(folder / "config.json")
    refuse_quantized(raw)
    eos_token_ids = _eos_token_ids(folder, raw)
    model: CausalLM
    if covers(raw):
        config = read_config(raw)
        checkpoint = Checkpoint(folder)
        roomy = _is_roomy(checkpoint, dtype, quantization, free_bytes)
        ops = OpTable.stock(device, dtype, quantization, decode_copies=roomy)
        model = assemble_decoder(checkpoint, config, ops, dtype, device, progress)
        notes = list(config.notes)
        if not roomy and quantization == "none":
            notes.append("memory is short: weights are held once, which makes single tokens slower")
    else:
        # imported here because Transformers takes a second to import
        from headrace.models.fallback import load_fallback

        if quantization != "none":
            raise UnsupportedModelError(
                f"quantization {quantization} needs a family that Headrace defines itself; "
                f"{raw.get('model_type')!r} runs on Transformers' definition",
                hint="leave out --quantization",
            )
        checkpoint = Checkpoint(folder)
        _is_roomy(checkpoint, dtype, quantization, free_bytes)
        ops = OpTable.stock(device, dtype, quantization)
        model, notes = load_fallback(folder, ops, dtype, device, progress)
    return LoadedModel(
        model=model,
        eos_token_ids=eos_token_ids,
        revision=revision or weights_revision(folder, checkpoint.files),
        weights_bytes=model.nbytes,
        notes=notes,
    )


def _is_roomy(checkpoint: Checkpoint, dtype: torch.dtype, quantization: str, free_bytes: int | None) -> bool:
    """Whether two copies of the weights leave half of the memory free.

    Raises InsufficientMemoryError when not even one fits.
    """
    if free_bytes is None:
        return True
    needed = checkpoint.num_elements * (1 if quantization == "int8" else dtype.itemsize)
    if needed > free_bytes:
        form = str(dtype).removeprefix("torch.") if quantization == "none" else quantization
        raise InsufficientMemoryError(
            f"the weights need {needed / 2**30:.2f} GiB as {form} and "
            f"{free_bytes / 2**30:.2f} GiB are available",
            hint="choose a smaller model or free memory"
            + (", or try --quantization int8" if quantization == "none" else ""),
        )
    return 2 * needed <= free_bytes // 2


def _eos_token_ids(folder: Path, raw: Mapping[str, Any]) -> list[int]:
    """From generation_config.json if it names any, else from config.json, else none."""
    path = folder / "generation_config.json"
    holders = [Fields(read_json(path), path.name)] if path.exists() else []
    config = Fields(raw)
    holders += [config, Fields(config.mapping("text_config"), "config.json: text_config")]
    for holder in holders:
        value = holder.value("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise holder.wrong("eos_token_id", "a token id or a list of them")
        return [token for token in ids if token >= 0]
    return []
