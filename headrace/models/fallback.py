"""Any other causal LM: Transformers' definition of the layers, our attention, cache and scheduler.

Everything else in such a model must work token by token, and all its memory must lie in attention:
``probe`` finds out at start-up and refuses what does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.kernels.table import OpTable
from headrace.models.assemble import LoadProgress
from headrace.models.probe import probe_model
from headrace.models.transformers_model import FallbackModel, rope_type


def load_fallback(
    folder: Path,
    ops: OpTable,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None = None,
) -> tuple[FallbackModel, list[str]]:
    """The model and notes for the operator.

    Raises UnsupportedModelError with the reason when Transformers does not know the architecture or the
    probe refuses it, CorruptFileError when tensors are missing.
    """
    with quiet_transformers():
        model = _from_pretrained(folder, dtype)
        model.to(device)
        if getattr(model.config, "output_router_logits", False):
            model.config.output_router_logits = False
        served = probe_model(model, ops, dtype, device)
    if progress:
        progress(served.nbytes, served.nbytes)
    name = type(model).__name__
    notes = [f"{name} runs on Transformers' definition with Headrace's attention, which is slower than ours"]
    kind = rope_type(model.config.get_text_config())
    if kind in ("dynamic", "longrope"):
        notes.append(
            f"rope type {kind} depends on the length of the whole batch: "
            f"served up to {served.config.max_position_embeddings} tokens, where it does not"
        )
    return served, notes


def _from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # every configuration class validates in its own way
        raise UnsupportedModelError(
            f"Transformers {transformers.__version__} does not know this model: {_first_line(error)}",
            hint="a newer Headrace may; models that bring their own code are not run",
        ) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{config.model_type} is no causal language model in Transformers",
            hint="give a model that generates text token by token",
        )
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise UnsupportedModelError(
            f"Transformers cannot load {config.model_type} from {folder}: {_first_line(error)}"
        ) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, info.get(kind) or ()))
        if names:
            raise CorruptFileError(
                f"{folder}: {kind.replace('_keys', '')} tensors for {type(model).__name__}: "
                f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}",
                hint="config.json and the weights do not belong together",
            )
    return model.eval()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps Transformers' bars and warnings out of our output while a model loads."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
