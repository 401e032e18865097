"""The one decoder that runs every covered family: all differences are in its config and its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.kernels.weights import DecoderWeights, LayerWeights, Norm, PackedLinear
from headrace.models.config import DecoderConfig, DecoderShape
from headrace.models.rope import Rope


class Decoder:
    """token ids → embedding → layers → final norm → logits, each step an op of the table.

    ``embedding`` is (vocab, hidden), or blocks of as much; ``head`` is packed from it when the two are tied,
    and shares its memory where weights are left as they are.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: OpTable,
        *,
        embedding: Tensor | PackedLinear,
        layers: list[LayerWeights],
        final_norm: Norm,
        head: PackedLinear,
    ) -> None:
        assert len(layers) == config.num_layers
        self.config = config
        self.ops = ops
        self._embedding = embedding
        device = final_norm.weight.device
        self._scale = None
        if config.embedding_scale != 1.0:
            # in the weights' type, as Gemma was trained: in bfloat16 the factor itself is rounded
            self._scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype, device=device)
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._ropes = [Rope(spec, device) for spec in config.ropes]

    @property
    def weights(self) -> DecoderWeights:
        """What its ops are called with, for whoever makes other forms of it."""
        return DecoderWeights(self._layers, self._final_norm, self._head, self.config.final_softcap)

    @property
    def dims(self) -> dict[str, int]:
        """Its DecoderShape, as a pack's conditions hold it."""
        return DecoderShape.of(self.config).as_dict()

    @property
    def nbytes(self) -> int:
        total = self._embedding.nbytes + self._final_norm.weight.nbytes
        shared = self._embedding
        if isinstance(shared, PackedLinear):
            total += 0 if self._head is shared else self._head.nbytes
        elif not self._head.shares(shared):
            total += self._head.nbytes
        for layer in self._layers:
            attention, mlp = layer.attention, layer.mlp
            packed = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
            norms = (
                attention.q_norm,
                attention.k_norm,
                layer.input_norm,
                layer.post_attention_norm,
                layer.pre_mlp_norm,
                layer.post_mlp_norm,
            )
            total += sum(item.nbytes for item in packed)
            total += sum(norm.weight.nbytes for norm in norms if norm is not None)
        return total

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: list[LayerKV]) -> Tensor:
        """token_ids (tokens,) int64 → (tokens, hidden_size); writes keys and values into ``kv``."""
        ops = self.ops
        x = ops.embedding(token_ids, self._embedding)  # (tokens, hidden)
        if self._scale is not None:
            x = x * self._scale
        angles = [rope.cos_sin(batch.positions, x.dtype, batch.num_positions) for rope in self._ropes]
        for layer, rope_index, cache in zip(self._layers, self.config.layer_ropes, kv, strict=True):
            cos, sin = angles[rope_index]
            x = ops.decoder_layer(x, layer, cos, sin, cache, batch)
        norm = self._final_norm
        return ops.rms_norm(x, norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) → (rows, vocab_size) float32."""
        return self.ops.logits_head(hidden, self._head, self.config.final_softcap)
