"""Builds a Decoder from a checkpoint: finds each tensor, checks its shape, fuses, converts and packs.

Layer by layer, so that beside the finished weights there is never more than one layer's worth in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.kernels.table import OpTable
from headrace.kernels.weights import (
    AttentionSpec,
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    Norm,
    PackedLinear,
)
from headrace.models.config import DecoderConfig
from headrace.models.decoder import Decoder
from headrace.models.held import Form, WeightHolder
from headrace.models.weights import Checkpoint

LoadProgress = Callable[[int, int], None]
"""Called with bytes of weights done and in all."""

# where the decoder's tensors begin: a causal LM, the text part of an image model (new, old), a bare model
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_IMAGE_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
# buffers that older versions saved
_BUFFERS = ("rotary_emb.inv_freq", ".masked_bias")


def assemble_decoder(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    ops: OpTable,
    form: Form,
    device: torch.device,
    progress: LoadProgress | None = None,
) -> tuple[Decoder, WeightHolder]:
    """The decoder with its weights on ``device``, held in ``form`` or packed by ``ops``; and who holds them.

    Raises CorruptFileError or UnsupportedModelError that names the tensor which is missing, left over,
    of another shape or no plain floating-point numbers.
    """
    assembly = _Assembly(checkpoint, config, ops, form, device, progress)
    return assembly.run(), assembly.holder


class _Assembly:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        ops: OpTable,
        form: Form,
        device: torch.device,
        progress: LoadProgress | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.ops = ops
        self.dtype = form.dtype
        self.holder = WeightHolder(checkpoint, ops, form, device)
        self.device = device
        self.progress = progress
        prefixes = [prefix for prefix in _PREFIXES if f"{prefix}norm.weight" in checkpoint]
        self.prefix = prefixes[0] if prefixes else _PREFIXES[0]

    def run(self) -> Decoder:
        config = self.config
        embedding, head = self.ends()
        self.tick()
        layers = []
        for index in range(config.num_layers):
            layers.append(self.layer(index))
            self.tick()
        final_norm = self.norm("norm", config.hidden_size)
        # an image model's other parts are known leftovers; anywhere else they are a surprise
        images = _IMAGE_PARTS if config.family == "gemma3" and self.prefix != "model." else ()
        self.checkpoint.finish(ignore_prefixes=images, ignore_suffixes=_BUFFERS)
        if self.progress:
            self.progress(self.checkpoint.nbytes, self.checkpoint.nbytes)
        return Decoder(config, self.ops, embedding=embedding, layers=layers, final_norm=final_norm, head=head)

    def tick(self) -> None:
        self.checkpoint.release()
        if self.progress:
            self.progress(min(self.checkpoint.taken_bytes, self.checkpoint.nbytes), self.checkpoint.nbytes)

    def ends(self) -> tuple[Tensor | PackedLinear, PackedLinear]:
        """Embedding and head. Tied as in Transformers: unless the checkpoint holds two that differ."""
        rows, hidden = self.config.vocab_size, self.config.hidden_size
        holder, checkpoint = self.holder, self.checkpoint
        name = f"{self.prefix}embed_tokens.weight"
        heads = [head for head in _HEADS if head in checkpoint] or list(_HEADS[:1])
        if not self.config.tie_word_embeddings:
            embedding = holder.embedding(name, rows, hidden)
            return embedding, holder.linear([(heads[0], rows)], hidden, few_rows=True)
        if name not in checkpoint and heads[0] in checkpoint:
            name = heads[0]
        embedding = holder.embedding(name, rows, hidden)
        if heads[0] in checkpoint and name != heads[0] and not checkpoint.alike(name, heads[0]):
            return embedding, holder.linear([(heads[0], rows)], hidden, few_rows=True)
        return embedding, holder.head_of(embedding)

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"layers.{index}."
        hidden = config.hidden_size
        before_attention = before_mlp = after_attention = after_mlp = None
        if config.norm_placement == "pre":
            before_attention = self.norm(prefix + "input_layernorm", hidden)
            before_mlp = self.norm(prefix + "post_attention_layernorm", hidden)
        else:
            after_attention = self.norm(prefix + "post_attention_layernorm", hidden)
            after_mlp = self.norm(prefix + "post_feedforward_layernorm", hidden)
        if config.norm_placement == "both":
            before_attention = self.norm(prefix + "input_layernorm", hidden)
            before_mlp = self.norm(prefix + "pre_feedforward_layernorm", hidden)
        return LayerWeights(
            attention=self.attention(prefix + "self_attn.", index),
            mlp=self.mlp(prefix + "mlp."),
            input_norm=before_attention,
            post_attention_norm=after_attention,
            pre_mlp_norm=before_mlp,
            post_mlp_norm=after_mlp,
        )

    def attention(self, prefix: str, index: int) -> AttentionWeights:
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if config.fused_checkpoint:
            parts = [("qkv_proj", q_size + 2 * kv_size)]
        else:
            parts = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        q_norm = k_norm = None
        if config.qk_norm != "none":
            whole = config.qk_norm == "projection"
            q_norm = self.norm(prefix + "q_norm", q_size if whole else config.head_dim)
            k_norm = self.norm(prefix + "k_norm", kv_size if whole else config.head_dim)
        return AttentionWeights(
            qkv=self.linear(prefix, parts, config.hidden_size, config.qkv_bias),
            out=self.linear(prefix, [("o_proj", config.hidden_size)], q_size, config.out_bias),
            spec=AttentionSpec(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                v_head_dim=config.head_dim,
                scale=config.attention_scale,
                sliding_window=config.sliding_windows[index],
                softcap=config.attention_softcap,
            ),
            q_norm=q_norm,
            k_norm=k_norm,
            qk_norm_full=config.qk_norm == "projection",
        )

    def mlp(self, prefix: str) -> MLPWeights:
        config = self.config
        inner = config.intermediate_size
        if config.fused_checkpoint:
            parts = [("gate_up_proj", 2 * inner)]
        else:
            parts = [("gate_proj", inner), ("up_proj", inner)]
        return MLPWeights(
            gate_up=self.linear(prefix, parts, config.hidden_size, config.mlp_bias, gated=True),
            down=self.linear(prefix, [("down_proj", config.hidden_size)], inner, config.mlp_bias),
            activation=config.activation,
        )

    def linear(
        self,
        prefix: str,
        parts: list[tuple[str, int]],
        in_features: int,
        has_bias: bool,
        gated: bool = False,
    ) -> PackedLinear:
        """The named projections as one, rows below rows."""
        start = self.prefix + prefix
        bias = None
        if has_bias:
            bias = self.checkpoint.join(
                [(f"{start}{name}.bias", (rows,)) for name, rows in parts], self.dtype, self.device
            )
        named = [(f"{start}{name}.weight", rows) for name, rows in parts]
        return self.holder.linear(named, in_features, bias, gated=gated)

    def norm(self, name: str, size: int) -> Norm:
        weight = self.stored_norm(f"{self.prefix}{name}.weight", size)
        return Norm(weight, self.config.norm_eps)

    def stored_norm(self, name: str, size: int) -> Tensor:
        if self.config.norm_plus_one:
            # Gemma multiplies by 1 + weight in float32
            return self.checkpoint.copy(name, (size,), torch.float32, self.device) + 1.0
        return self.checkpoint.copy(name, (size,), self.dtype, self.device)
