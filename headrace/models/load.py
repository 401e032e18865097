"""From a model folder to a model that can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from headrace.models.held import Form, WeightHolder, needed_bytes
from headrace.models.weights import Checkpoint, weights_revision


@dataclass(frozen=True)
class LoadedModel:
    """``eos_token_ids`` end a reply; ``revision`` names the weights for block identity, together with
    ``form``, what became of their numbers (empty: the dtype asked for). ``notes`` are for the operator.

    ``weights_bytes`` is what they take, ``mapped_bytes`` as much of it as lies in the files' own pages:
    memory that the system takes back when it needs it, which costs nothing once a pack has a form of its own.
    ``release`` lets it do so now.
    """

    model: CausalLM
    eos_token_ids: list[int]
    revision: str
    weights_bytes: int
    notes: list[str]
    form: str
    mapped_bytes: int
    release: Callable[[], None]


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    pack_formats: frozenset[str] = frozenset(),
    revision: str = "",
    progress: LoadProgress | None = None,
    free_bytes: int | None = None,
) -> LoadedModel:
    """Loads a folder in the Hugging Face layout: our decoder if it covers the family, else Transformers'
    definition with our attention.

    ``quantization``: "auto" keeps the blocks of a quantized file where a pack reads them, "none" makes
    numbers of them, "int8" rounds any weights to 8 bits. ``pack_formats``: the formats of weights that
    kernels read of a pack that will compute every step (``PackManifest.step_formats``); empty: there is no
    such pack, and weights are held as torch's operators like them (held.py).

    ``revision`` is what names the weights, empty: a digest of them; ``progress`` gets bytes done and bytes in
    all; ``free_bytes`` is the memory there is, None: enough.

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
        form = Form(dtype, quantization, pack_formats)
        roomy = _is_roomy(needed_bytes(checkpoint, form), form, free_bytes)
        stock_quantization = "int8" if quantization == "int8" and not form.makes_blocks else "none"
        copies = roomy and not pack_formats
        ops = OpTable.stock(device, dtype, stock_quantization, decode_copies=copies)
        model, holder = assemble_decoder(checkpoint, config, ops, form, device, progress)
        notes = [*config.notes, *_notes(holder, form, roomy)]
    else:
        # imported here because Transformers takes a second to import
        from headrace.models.fallback import load_fallback

        if quantization == "int8":
            raise UnsupportedModelError(
                f"quantization {quantization} needs a family that Headrace defines itself; "
                f"{raw.get('model_type')!r} runs on Transformers' definition",
                hint="leave out --quantization",
            )
        checkpoint, holder = Checkpoint(folder), None
        form = Form(dtype)
        _is_roomy(needed_bytes(checkpoint, form), form, free_bytes)
        ops = OpTable.stock(device, dtype)
        model, notes = load_fallback(folder, ops, dtype, device, progress)
    return LoadedModel(
        model=model,
        eos_token_ids=eos_token_ids,
        revision=revision or weights_revision(folder, checkpoint.files),
        weights_bytes=model.nbytes,
        notes=notes,
        form=form.name(holder.kept_formats if holder else ()),
        mapped_bytes=holder.mapped_bytes if holder else 0,
        release=checkpoint.release,
    )


def _is_roomy(needed: int, form: Form, free_bytes: int | None) -> bool:
    """Whether two copies of the weights leave half of the memory free.

    Raises InsufficientMemoryError when not even one fits.
    """
    if free_bytes is None:
        return True
    if needed > free_bytes:
        kind = "int8" if form.quantization == "int8" else form.dtype_name
        raise InsufficientMemoryError(
            f"the weights need {needed / 2**30:.2f} GiB as {kind} and "
            f"{free_bytes / 2**30:.2f} GiB are available",
            hint="choose a smaller model or free memory"
            + ("" if form.quantization == "int8" else ", or try --quantization int8"),
        )
    return 2 * needed <= free_bytes // 2


def _notes(holder: WeightHolder, form: Form, roomy: bool) -> list[str]:
    if form.makes_blocks:
        return ["weights rounded to 8 bits in groups of 32"]
    if holder.kept_formats:
        return [f"weights as stored: {', '.join(sorted(holder.kept_formats))}"]
    if not roomy and not form.pack_formats and form.quantization != "int8":
        return ["memory is short: weights are held once, which makes single tokens slower"]
    return []


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
