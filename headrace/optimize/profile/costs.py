"""What one call of an op has to do at least: floating-point operations, and bytes moved to and from memory.

    flops    two for each multiply-add of a product; a few for each element elsewhere
    bytes    every weight, key and value that is needed read once, every input read and every output written
             once; what a composite passes from part to part counts for the parts alone

So a composite's bytes are those of one fused kernel, and the difference to its parts' is what fusing saves.
Which rate bounds a product follows from what is stored, as a kernel may compute in no less: weights in blocks
multiply as bytes (activations are rounded to bytes too), other weights, keys and values in their own dtype.
``resident`` are the bytes that stay where they are from step to step (weights, the cache): what a step
streams through, and thus the footprint of the roof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.blocks import read_parts
from headrace.kernels.cache import LayerKV
from headrace.kernels.linear import FEW_ROWS
from headrace.kernels.weights import (
    AttentionSpec,
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    Norm,
    PackedLinear,
)

_NORM_FLOPS = 4
_ROPE_FLOPS = 3
_ACTIVATION_FLOPS = 6
_SOFTMAX_FLOPS = 4
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Cost:
    """One call. ``context`` is the median of the cached tokens of its sequences, 0 where it sees no cache.
    ``products`` are those of ``flops`` that are not computed in ``dtype`` at best, by what they are in."""

    rows: int
    dtype: str
    dims: dict[str, int]
    flops: float
    nbytes: float
    resident: float = 0.0
    context: int = 0
    products: Mapping[str, float] = field(default_factory=dict)


def call_cost(op: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Cost:
    """The cost of an op of the table called with ``arguments``; a composite without the table before them."""
    return _COSTS[op](*arguments, **keywords)


def weight_bytes(packed: PackedLinear, rows: int) -> float:
    """Bytes of the form that a call with so many rows reads."""
    if packed.form == "blocks":
        assert packed.weight is not None
        return float(packed.weight.nbytes + (0 if packed.bias is None else packed.bias.nbytes))
    size = packed.in_features * packed.out_features
    if packed.few is not None and (rows <= FEW_ROWS or packed.weight is None):
        itemsize = 2
    else:
        itemsize = packed.dtype.itemsize if packed.weight is None else packed.weight.element_size()
    extras = sum(extra.nbytes for extra in (packed.bias, packed.scales) if extra is not None)
    return float(size * itemsize + extras)


def _embedding(token_ids: Tensor, weight: Tensor | PackedLinear) -> Cost:
    rows = token_ids.shape[0]
    if isinstance(weight, PackedLinear):
        vocab, hidden = weight.out_features, weight.in_features
        row = weight_bytes(weight, rows) / vocab
    else:
        vocab, hidden = weight.shape
        row = float(hidden * weight.element_size())
    moved = rows * (row + hidden * weight.dtype.itemsize) + token_ids.nbytes
    return Cost(rows, _name(weight.dtype), {"vocab_size": vocab, "hidden_size": hidden}, 0.0, moved)


def _product(x: Tensor, packed: PackedLinear, out_bytes: float, dims: dict[str, int]) -> Cost:
    rows = x.shape[0]
    weight = weight_bytes(packed, rows)
    products = _products(rows, packed)
    flops = sum(products.values())
    moved = x.nbytes + weight + out_bytes
    return Cost(rows, _name(x.dtype), dims, flops, moved, weight, products=products)


def _linear(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Cost:
    out = x.shape[0] * packed.out_features * x.element_size()
    dims = {"in_features": packed.in_features, "out_features": packed.out_features}
    return _product(x, packed, out * (1 if residual is None else 2), dims)


def _logits_head(hidden: Tensor, packed: PackedLinear, softcap: float | None = None) -> Cost:
    dims = {"in_features": packed.in_features, "out_features": packed.out_features}
    return _product(hidden, packed, 4.0 * hidden.shape[0] * packed.out_features, dims)


def _gated_linear(x: Tensor, packed: PackedLinear, activation: str) -> Cost:
    inner = packed.out_features // 2
    dims = {"in_features": packed.in_features, "out_features": inner}
    return _product(x, packed, float(x.shape[0] * inner * x.element_size()), dims)


def _rms_norm(x: Tensor, norm: Norm) -> Cost:
    size = x.shape[-1]
    moved = 2.0 * x.nbytes + norm.gain.nbytes
    return Cost(x.numel() // size, _name(x.dtype), {"size": size}, float(_NORM_FLOPS * x.numel()), moved)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Cost:
    tokens, heads, head_dim = x.shape
    turned = tokens * heads * cos.shape[-1]
    dims = {"num_heads": heads, "head_dim": head_dim, "rotary_dim": cos.shape[-1]}
    moved = 2.0 * turned * x.element_size() + cos.nbytes + sin.nbytes
    return Cost(tokens, _name(x.dtype), dims, float(_ROPE_FLOPS * turned), moved)


def _activation_and_mul(gate_up: Tensor, activation: str) -> Cost:
    inner = gate_up.shape[-1] // 2
    flops = float(_ACTIVATION_FLOPS * gate_up.shape[0] * inner)
    return Cost(
        gate_up.shape[0], _name(gate_up.dtype), {"intermediate_size": inner}, flops, 1.5 * gate_up.nbytes
    )


def _attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec
) -> Cost:
    rows = q.shape[0]
    out = rows * spec.num_heads * spec.v_head_dim * q.element_size()
    flops, cache = _attended(kv, batch, spec)
    dims = {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
        "window": spec.sliding_window or 0,
    }
    moved = q.nbytes + k.nbytes + v.nbytes + out + cache
    products = {_name(kv.keys.dtype): flops}
    return Cost(rows, _name(q.dtype), dims, flops, moved, cache, _context(batch), products)


def _attended(kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec) -> tuple[float, float]:
    """FLOPs of scores, softmax and sums over all rows; bytes of the cache read and written."""
    window = spec.sliding_window or 1 << 60
    pairs = sum(min(length, window) for length in batch.decode_lens_list)  # (query, key)
    keys = pairs
    for chunk in batch.prefills:
        count = chunk.end - chunk.start
        whole = max(0, min(count, window - chunk.context_len))  # queries that see everything before them
        pairs += whole * chunk.context_len + whole * (whole + 1) // 2 + (count - whole) * min(window, 1 << 40)
        keys += min(chunk.context_len + count, window + count)
    per_pair = 2 * (spec.head_dim + spec.v_head_dim) + _SOFTMAX_FLOPS
    per_token = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * kv.keys.element_size()
    return float(pairs * spec.num_heads * per_pair), float((keys + batch.num_tokens) * per_token)


def _mlp_block(x: Tensor, weights: MLPWeights, residual: Tensor | None = None) -> Cost:
    rows = x.shape[0]
    inner = weights.down.in_features
    weight = weight_bytes(weights.gate_up, rows) + weight_bytes(weights.down, rows)
    dims = {"hidden_size": x.shape[1], "intermediate_size": inner}
    moved = x.nbytes * (2.0 if residual is None else 3.0) + weight
    products = _products(rows, weights.gate_up, weights.down)
    flops = sum(products.values()) + _ACTIVATION_FLOPS * rows * inner
    return Cost(rows, _name(x.dtype), dims, flops, moved, weight, products=products)


def _attention_block(
    x: Tensor,
    weights: AttentionWeights,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    residual: Tensor | None = None,
) -> Cost:
    rows, spec = x.shape[0], weights.spec
    attended, cache = _attended(kv, batch, spec)
    weight = weight_bytes(weights.qkv, rows) + weight_bytes(weights.out, rows)
    heads = spec.num_heads + spec.num_kv_heads
    products = _products(rows, weights.qkv, weights.out) + Counter({_name(kv.keys.dtype): attended})
    flops = sum(products.values()) + _ROPE_FLOPS * rows * heads * cos.shape[-1]
    if weights.q_norm is not None:
        flops += _NORM_FLOPS * rows * heads * spec.head_dim
    dims = {
        "hidden_size": x.shape[1],
        "rotary_dim": cos.shape[-1],
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
        "window": spec.sliding_window or 0,
    }
    moved = x.nbytes * (2.0 if residual is None else 3.0) + weight + cache + cos.nbytes + sin.nbytes
    return Cost(rows, _name(x.dtype), dims, flops, moved, weight + cache, _context(batch), products)


def _decoder_layer(
    x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, kv: LayerKV, batch: AttentionBatch
) -> Cost:
    attention = _attention_block(x, layer.attention, cos, sin, kv, batch)
    mlp = _mlp_block(x, layer.mlp)
    norms = [
        norm
        for norm in (
            layer.input_norm,
            layer.post_attention_norm,
            layer.pre_mlp_norm,
            layer.post_mlp_norm,
        )
        if norm is not None
    ]
    moved = attention.nbytes + mlp.nbytes - 2.0 * x.nbytes + sum(norm.gain.nbytes for norm in norms)
    return Cost(
        attention.rows,
        attention.dtype,
        attention.dims | mlp.dims,
        attention.flops + mlp.flops + _NORM_FLOPS * len(norms) * x.numel(),
        moved,
        attention.resident + mlp.resident,
        attention.context,
        Counter(attention.products) + Counter(mlp.products),
    )


def _products(rows: int, *weights: PackedLinear) -> Counter[str]:
    """Operations of products by the dtype that they can be computed in at best."""
    found: Counter[str] = Counter()
    for packed in weights:
        parts = [(_name(packed.dtype), packed.out_features)]
        if packed.form == "blocks":
            assert packed.weight is not None
            parts = [(part.format, part.rows) for part in read_parts(packed.weight)]
        for kind, columns in parts:
            kind = kind if kind in _FLOATS else "int8"
            found[kind] += 2.0 * rows * packed.in_features * columns  # type: ignore[assignment]
    return found


def _context(batch: AttentionBatch) -> int:
    lengths = [length - 1 for length in batch.decode_lens_list]
    lengths += [chunk.context_len for chunk in batch.prefills]
    return sorted(lengths)[len(lengths) // 2] if lengths else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_COSTS: dict[str, Callable[..., Cost]] = {
    "embedding": _embedding,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "activation_and_mul": _activation_and_mul,
    "attention": _attention,
    "logits_head": _logits_head,
    "mlp_block": _mlp_block,
    "attention_block": _attention_block,
    "decoder_layer": _decoder_layer,
}
