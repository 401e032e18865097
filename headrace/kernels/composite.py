"""Composite ops: by default the composition of their parts, each called through the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.weights import AttentionWeights, LayerWeights, MLPWeights, Norm, PackedLinear

if TYPE_CHECKING:
    from headrace.kernels.table import OpTable


def attention_block(
    ops: OpTable,
    x: Tensor,
    weights: AttentionWeights,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    residual: Tensor | None = None,
) -> Tensor:
    """(tokens, hidden), already normed → attention's output (tokens, hidden), plus ``residual`` if given."""
    spec = weights.spec
    heads, kv_heads, tokens = spec.num_heads, spec.num_kv_heads, x.shape[0]
    qkv = ops.linear(x, weights.qkv)
    split = (heads + kv_heads) * spec.head_dim
    qk = qkv[:, :split].view(tokens, heads + kv_heads, spec.head_dim)
    v = qkv[:, split:].view(tokens, kv_heads, spec.v_head_dim)
    if weights.q_norm is None and weights.k_norm is None:
        qk = ops.rope(qk, cos, sin)  # q and k in one go
        q, k = qk[:, :heads], qk[:, heads:]
    else:
        q = _norm_heads(ops, qk[:, :heads], weights.q_norm, weights.qk_norm_full)
        k = _norm_heads(ops, qk[:, heads:], weights.k_norm, weights.qk_norm_full)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
    return ops.linear(ops.attention(q, k, v, kv, batch, spec), weights.out, residual)


def gated_linear(ops: OpTable, x: Tensor, packed: PackedLinear, activation: str) -> Tensor:
    """(tokens, hidden) → act(gate) * up, where ``packed`` yields gate | up."""
    return ops.activation_and_mul(ops.linear(x, packed), activation)


def mlp_block(ops: OpTable, x: Tensor, weights: MLPWeights, residual: Tensor | None = None) -> Tensor:
    """(tokens, hidden), already normed → down(act(gate) * up), plus ``residual`` if given."""
    return ops.linear(ops.gated_linear(x, weights.gate_up, weights.activation), weights.down, residual)


def decoder_layer(
    ops: OpTable,
    x: Tensor,
    layer: LayerWeights,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
) -> Tensor:
    """(tokens, hidden) → (tokens, hidden): attention and MLP, each around the residual stream."""
    h = _norm(ops, x, layer.input_norm)
    if layer.post_attention_norm is None:
        x = ops.attention_block(h, layer.attention, cos, sin, kv, batch, x)
    else:
        attended = ops.attention_block(h, layer.attention, cos, sin, kv, batch)
        x = x + _norm(ops, attended, layer.post_attention_norm)
    h = _norm(ops, x, layer.pre_mlp_norm)
    if layer.post_mlp_norm is None:
        return ops.mlp_block(h, layer.mlp, x)
    return x + _norm(ops, ops.mlp_block(h, layer.mlp), layer.post_mlp_norm)


def _norm(ops: OpTable, x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else ops.rms_norm(x, norm)


def _norm_heads(ops: OpTable, x: Tensor, norm: Norm | None, full: bool) -> Tensor:
    if norm is None:
        return x
    if full:
        return _norm(ops, x.flatten(1), norm).view(x.shape)
    return _norm(ops, x, norm)
