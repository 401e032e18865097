"""Every op in plain torch: what each means, and what every faster implementation is checked against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.blocks import lookup
from headrace.kernels.cache import LayerKV
from headrace.kernels.weights import AttentionSpec, Norm, PackedLinear, plain_linear


def pack_linear(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, few_rows: bool = False
) -> PackedLinear:
    """A weight (out, in) and bias (out,) in the form this table reads; here: as loaded.

    Hints that may be ignored. ``gated``: the upper half of the rows is a gate, the lower half what it
    multiplies. ``few_rows``: only ever applied to a few rows at a time, as an output head is.
    """
    return plain_linear(weight, bias)


def embedding(token_ids: Tensor, weight: Tensor | PackedLinear) -> Tensor:
    """(tokens,) ids and (vocab, hidden), or blocks of as much → (tokens, hidden)."""
    if isinstance(weight, PackedLinear):
        assert weight.form == "blocks" and weight.weight is not None
        return lookup(weight.weight, weight.in_features, token_ids).to(weight.dtype)
    return weight[token_ids]


def linear(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """(tokens, in) → (tokens, out): x @ weight.T + bias, plus ``residual`` (tokens, out) when given."""
    y = x @ packed.dense().to(x.dtype).T
    if packed.bias is not None:
        y = y + packed.bias
    return y if residual is None else y + residual


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (offset + weight) over the last dimension, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (normed * (norm.weight.to(wide.dtype) + norm.offset)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + r/2) of the first r features of x: (tokens, heads, head_dim).

    An implementation may rotate in place: x is not to be read afterwards.

    cos, sin: (tokens, 1, r), r <= head_dim even, each angle given twice: feature i and i + r/2. ``sin`` is
    signed: its first half is negated, so that the rotation is x * cos + swap_halves(x) * sin.
    (Su et al., arXiv 2104.09864, in the half-split form of the Llama checkpoints.)
    """
    rotated_dim = cos.shape[-1]
    head, tail = x[..., :rotated_dim], x[..., rotated_dim:]
    swapped = torch.cat((head[..., rotated_dim // 2 :], head[..., : rotated_dim // 2]), dim=-1)
    return torch.cat((head * cos + swapped * sin, tail), dim=-1)


def activation_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """(tokens, gate | up) → act(gate) * up; ``activation``: silu, gelu (erf) or gelu_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def logits_head(hidden: Tensor, packed: PackedLinear, softcap: float | None = None) -> Tensor:
    """(rows, hidden) → (rows, vocab) float32 logits, soft-capped when the model does so."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = linear(hidden, packed).to(wide)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    spec: AttentionSpec,
) -> Tensor:
    """Writes k and v into the cache, then lets every row attend to its own sequence's cached keys.

    q (tokens, num_heads, head_dim), k (tokens, num_kv_heads, head_dim), v (tokens, num_kv_heads,
    v_head_dim) → (tokens, num_heads * v_head_dim). Query head h reads key head h // (num_heads //
    num_kv_heads).
    """
    kv.keys[:, batch.slot_mapping] = k.transpose(0, 1).to(kv.keys.dtype)
    kv.values[:, batch.slot_mapping] = v.transpose(0, 1).to(kv.values.dtype)
    out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_dim)
    for index, length in enumerate(batch.decode_lens_list):
        table = batch.decode_block_tables[index]
        out[index : index + 1] = _attend(q[index : index + 1], kv, table, length, spec)
    for chunk in batch.prefills:
        length = chunk.context_len + chunk.end - chunk.start
        queries = q[chunk.start : chunk.end]
        out[chunk.start : chunk.end] = _attend(queries, kv, chunk.block_table, length, spec)
    return out.flatten(1)


def _attend(q: Tensor, kv: LayerKV, block_table: Tensor, length: int, spec: AttentionSpec) -> Tensor:
    """The last q.shape[0] of ``length`` tokens over all of them: (queries, heads, v_head_dim)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(length, device=q.device)
    slots = block_table[position // kv.block_size] * kv.block_size + position % kv.block_size
    group = spec.num_heads // spec.num_kv_heads
    keys = kv.keys[:, slots].to(wide).repeat_interleave(group, dim=0)  # (heads, length, head_dim)
    values = kv.values[:, slots].to(wide).repeat_interleave(group, dim=0)
    scores = torch.einsum("qhd,hkd->hqk", q.to(wide), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = position[length - q.shape[0] :, None] - position[None, :]
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.to(wide)[:, None, None].expand(-1, q.shape[0], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype)
