"""What an engine asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.models.config import ModelConfig


class CausalLM(Protocol):
    """A causal language model over a paged cache.

    ``ops`` may be exchanged between steps. Call both methods under ``torch.inference_mode``.
    """

    ops: OpTable

    @property
    def config(self) -> ModelConfig: ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weights occupy."""
        ...

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: list[LayerKV]) -> Tensor:
        """token_ids (tokens,) int64, rows in the batch's order → hidden states (tokens, hidden_size).

        Writes the tokens' keys and values into ``kv``, one cache a layer.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) → (rows, vocab_size) float32."""
        ...
