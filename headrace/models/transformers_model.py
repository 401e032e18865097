"""A Transformers definition as a CausalLM of ours.

A batch is one row of tokens, all sequences' new tokens after one another; position_ids tell where each
stands, and the attention hook keeps sequences apart.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headrace.core.errors import EngineError, UnsupportedModelError
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.kernels.weights import AttentionSpec
from headrace.models.attention_hook import Handler, Hook, Serving
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


def base_name(model: Any) -> str:
    """The attribute that holds everything below the head. Raises UnsupportedModelError if there is none."""
    for name in (model.base_model_prefix, "model"):
        if isinstance(getattr(model, name, None), nn.Module):
            return str(name)
    raise UnsupportedModelError("its head and its layers are one module")


def run_base(model: Any, hook: Hook, handler: Handler, token_ids: Tensor, positions: Tensor) -> Tensor:
    """One pass of everything below the head, its attention answered by ``handler``: (tokens, hidden)."""
    hook.handler = handler
    try:
        out = getattr(model, base_name(model))(
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
    name = base_name(model)
    twin._modules = {**model._modules, name: _GivenHidden(getattr(model, name))}
    return twin


class _GivenHidden(nn.Module):
    """Stands in for ``layers``, and for every module in it: whichever is called returns what it is given."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layers"] = layers  # not a submodule: it would be listed twice

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        return _Result(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_layers"], name)
        return self if isinstance(value, nn.Module) else value


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
    if rope_type(text) == "longrope":
        parameters = text.rope_parameters
        positions = min(positions, parameters.get("original_max_position_embeddings") or positions)
    return int(positions)


def rope_type(text: Any) -> str:
    parameters = getattr(text, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))
