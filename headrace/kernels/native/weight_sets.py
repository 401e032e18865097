"""Which weights, ints and floats an op is called with: one set for each record that calls come with.

op                            recognised by
linear, gated_linear          PackedLinear
logits_head                   PackedLinear
mlp_block                     MLPWeights
attention_block               AttentionWeights
decoder_layer                 LayerWeights
rms_norm                      Norm
attention                     AttentionSpec
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headrace.kernels.native.signature import ACTIVATIONS
from headrace.kernels.weights import (
    AttentionSpec,
    AttentionWeights,
    DecoderWeights,
    LayerWeights,
    MLPWeights,
    Norm,
    PackedLinear,
)


@dataclass(frozen=True)
class WeightSet:
    """One call's constant part. ``owner``: the record whose identity says that it is this one;
    ``linears`` and ``tensors`` by slot, absent ones left out; ``out_features`` is the output's width."""

    owner: Any
    in_features: int
    out_features: int
    linears: dict[str, PackedLinear] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ints: dict[str, int] = field(default_factory=dict)
    floats: dict[str, float] = field(default_factory=dict)


def weight_sets(op: str, weights: DecoderWeights) -> list[WeightSet]:
    """All sets that a model calls ``op`` with; none for ops without weights, and for a layer whose norms
    differ in eps or offset."""
    return list(_sets(op, weights))


def _sets(op: str, weights: DecoderWeights) -> Iterator[WeightSet]:
    if op == "logits_head":
        yield linear_set(weights.head, softcap=weights.softcap or 0.0)
    elif op == "rms_norm":
        for norm in _norms(weights):
            yield norm_set(norm)
    for layer in weights.layers:
        attention, mlp = layer.attention, layer.mlp
        if op == "linear":
            for packed in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
                yield linear_set(packed)
        elif op == "gated_linear":
            yield gated_set(mlp.gate_up, mlp.activation)
        elif op == "mlp_block":
            yield mlp_set(mlp)
        elif op == "attention":
            yield attention_set(attention.spec)
        elif op == "attention_block" and _alike(attention.q_norm, attention.k_norm):
            yield attention_block_set(attention)
        elif op == "decoder_layer":
            found = layer_set(layer)
            if found is not None:
                yield found


def linear_set(packed: PackedLinear, softcap: float | None = None) -> WeightSet:
    """``softcap`` is given for a logits_head alone."""
    floats = {} if softcap is None else {"softcap": softcap}
    return WeightSet(
        packed, packed.in_features, packed.out_features, {"weight": packed}, _bias("bias", packed), {}, floats
    )


def gated_set(packed: PackedLinear, activation: str) -> WeightSet:
    ints = {"activation": ACTIVATIONS.index(activation)}
    return WeightSet(
        packed, packed.in_features, packed.out_features // 2, {"weight": packed}, _bias("bias", packed), ints
    )


def norm_set(norm: Norm) -> WeightSet:
    size = norm.weight.shape[-1]
    floats = {"eps": norm.eps, "offset": norm.offset}
    return WeightSet(norm, size, size, {}, {"weight": norm.weight}, {}, floats)


def mlp_set(mlp: MLPWeights) -> WeightSet:
    return WeightSet(
        mlp,
        mlp.gate_up.in_features,
        mlp.down.out_features,
        {"gate_up": mlp.gate_up, "down": mlp.down},
        _bias("gate_up_bias", mlp.gate_up) | _bias("down_bias", mlp.down),
        {"activation": ACTIVATIONS.index(mlp.activation)},
    )


def attention_set(spec: AttentionSpec) -> WeightSet:
    tensors = {} if spec.sinks is None else {"sinks": spec.sinks}
    ints = {"window": spec.sliding_window or 0, "num_kv_heads": spec.num_kv_heads}
    floats = {"scale": spec.scale, "softcap": spec.softcap or 0.0}
    width = spec.num_heads * spec.v_head_dim
    return WeightSet(spec, spec.num_heads * spec.head_dim, width, {}, tensors, ints, floats)


def attention_block_set(weights: AttentionWeights) -> WeightSet:
    spec = weights.spec
    inner = attention_set(spec)
    qk_norm = weights.q_norm or weights.k_norm
    return WeightSet(
        weights,
        weights.qkv.in_features,
        weights.out.out_features,
        {"qkv": weights.qkv, "o": weights.out},
        inner.tensors
        | _bias("qkv_bias", weights.qkv)
        | _bias("o_bias", weights.out)
        | _norm_weight("q_norm", weights.q_norm)
        | _norm_weight("k_norm", weights.k_norm),
        inner.ints
        | {
            "num_heads": spec.num_heads,
            "head_dim": spec.head_dim,
            "v_head_dim": spec.v_head_dim,
            "qk_norm_full": int(weights.qk_norm_full),
        },
        inner.floats
        | {
            "qk_norm_eps": qk_norm.eps if qk_norm is not None else 0.0,
            "qk_norm_offset": qk_norm.offset if qk_norm is not None else 0.0,
        },
    )


def layer_set(layer: LayerWeights) -> WeightSet | None:
    """None when its norms differ in eps or offset: a call has one number for all."""
    norms = {
        "input_norm": layer.input_norm,
        "post_attention_norm": layer.post_attention_norm,
        "pre_mlp_norm": layer.pre_mlp_norm,
        "post_mlp_norm": layer.post_mlp_norm,
    }
    if not _alike(*norms.values()) or not _alike(layer.attention.q_norm, layer.attention.k_norm):
        return None
    block, mlp = attention_block_set(layer.attention), mlp_set(layer.mlp)
    tensors = block.tensors | mlp.tensors
    for name, norm in norms.items():
        tensors |= _norm_weight(name, norm)
    first = next((norm for norm in norms.values() if norm is not None), None)
    return WeightSet(
        layer,
        block.in_features,
        mlp.out_features,
        block.linears | mlp.linears,
        tensors,
        block.ints | mlp.ints,
        block.floats
        | {
            "norm_eps": first.eps if first is not None else 0.0,
            "norm_offset": first.offset if first is not None else 0.0,
        },
    )


def _norms(weights: DecoderWeights) -> Iterator[Norm]:
    for layer in weights.layers:
        for norm in (
            layer.input_norm,
            layer.post_attention_norm,
            layer.pre_mlp_norm,
            layer.post_mlp_norm,
            layer.attention.q_norm,
            layer.attention.k_norm,
        ):
            if norm is not None:
                yield norm
    yield weights.final_norm


def _alike(*norms: Norm | None) -> bool:
    return len({(norm.eps, norm.offset) for norm in norms if norm is not None}) <= 1


def _bias(slot: str, packed: PackedLinear) -> dict[str, Tensor]:
    return {} if packed.bias is None else {slot: packed.bias}


def _norm_weight(slot: str, norm: Norm | None) -> dict[str, Tensor]:
    return {} if norm is None else {slot: norm.weight}
