"""Any other causal LM: Transformers' definition of the layers, our attention, cache and scheduler.

A batch is one row of tokens, all sequences' new tokens after one another; position_ids tell where each
stands, and the attention hook keeps sequences apart. So everything else in the model must work token by
token, and all its memory must lie in attention: ``probe`` finds out at start-up and refuses what does not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from headrace.core.errors import CorruptFileError, EngineError, UnsupportedModelError
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.kernels.weights import AttentionSpec
from headrace.models.assemble import Progress
from headrace.models.attention_hook import Hook, Serving
from headrace.models.config import KVSpec

_DEFAULT_POSITIONS = 2048


@dataclass(frozen=True)
class FallbackConfig:
    """What the engine asks, read from Transformers' configuration and from the probe."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    kv_specs: list[KVSpec]


class FallbackModel:
    """A Transformers causal LM as a CausalLM of ours. ``probe_model`` gives the specs, one a layer."""

    def __init__(
        self, model: Any, hook: Hook, ops: OpTable, specs: list[AttentionSpec], hidden_size: int
    ) -> None:
        text = model.config.get_text_config()
        self.ops = ops
        self.config = FallbackConfig(
            vocab_size=text.vocab_size,
            hidden_size=hidden_size,
            num_layers=len(specs),
            max_position_embeddings=served_positions(text),
            kv_specs=[KVSpec(spec.num_kv_heads, spec.head_dim, spec.v_head_dim) for spec in specs],
        )
        self._model = model
        self._hook = hook
        self._specs = specs
        self._head = head_of(model)

    @property
    def nbytes(self) -> int:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: list[LayerKV]) -> Tensor:
        """token_ids (tokens,) int64 → (tokens, hidden_size); writes keys and values into ``kv``."""
        serving = Serving(self.ops, self._specs, batch, kv)
        hidden = run_base(self._model, self._hook, serving, token_ids, batch.positions)
        if serving.calls != len(self._specs):
            raise EngineError(f"{serving.calls} attention calls in a pass of {len(self._specs)} layers")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) → (rows, vocab_size) float32."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


def load_fallback(
    folder: Path,
    ops: OpTable,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[FallbackModel, list[str]]:
    """The model and notes for the operator.

    Raises UnsupportedModelError with the reason when Transformers does not know the architecture or the
    probe refuses it, CorruptFileError when tensors are missing.
    """
    # here, because the probe needs this module's FallbackModel
    from headrace.models.probe import probe_model

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
    kind = _rope_type(model.config.get_text_config())
    if kind in ("dynamic", "longrope"):
        notes.append(
            f"rope type {kind} depends on the length of the whole batch: "
            f"served up to {served.config.max_position_embeddings} tokens, where it does not"
        )
    return served, notes


def run_base(model: Any, hook: Hook, handler: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    """One pass of everything below the head, its attention answered by ``handler``: (tokens, hidden)."""
    hook.handler = handler
    try:
        out = getattr(model, model.base_model_prefix)(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        )
    finally:
        hook.handler = None
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def head_of(model: Any) -> Any:
    """A twin of the model, sharing its weights, whose layers are replaced by "take this as the result".

    What the causal LM does after its layers (scale, cap, project, bias) then stays Transformers' own.
    """
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    twin._modules[model.base_model_prefix] = _GivenHidden()
    return twin


class _GivenHidden(nn.Module):
    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        return _Result(inputs_embeds)


class _Result:
    """A model output with a last hidden state and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def served_positions(text: Any) -> int:
    """The longest sequence the configuration allows, and that every batch computes alike."""
    positions = getattr(text, "max_position_embeddings", None) or _DEFAULT_POSITIONS
    if _rope_type(text) == "longrope":
        parameters = text.rope_parameters
        positions = min(positions, parameters.get("original_max_position_embeddings") or positions)
    return int(positions)


def _rope_type(text: Any) -> str:
    parameters = getattr(text, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def _from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
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
