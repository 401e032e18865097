"""The call of an op as Python makes it, from the slots of a native call; and its answer back in slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.native.build_cache import build_pack, default_build_folder
from headrace.kernels.native.op import NativeKernel, make_op
from headrace.kernels.native.pack import read_manifest
from headrace.kernels.native.signature import ACTIVATIONS
from headrace.kernels.native.store import WeightStore
from headrace.kernels.native.weight_sets import (
    WeightSet,
    attention_block_set,
    attention_set,
    gated_set,
    linear_set,
    mlp_set,
    norm_set,
    weight_sets,
)
from headrace.kernels.table import OpTable
from headrace.kernels.weights import (
    AttentionSpec,
    AttentionWeights,
    DecoderWeights,
    LayerWeights,
    MLPWeights,
    Norm,
    PackedLinear,
)
from headrace.optimize.judge.problem import Tensors, TensorSpec

Numbers = Mapping[str, Any]


def weight_record(
    op: str,
    table: OpTable,
    weights: Tensors,
    ints: Numbers,
    floats: Numbers,
    in_blocks: Mapping[str, TensorSpec] | None = None,
) -> Any:
    """What the op's calls are made with: a PackedLinear, Norm, AttentionSpec, MLPWeights, AttentionWeights or
    LayerWeights in ``table``'s own form; None for ops without weights. ``in_blocks``: slots whose tensor is a
    buffer of blocks, where it is one."""
    if in_blocks:
        table = _taking_blocks(table, weights, in_blocks)
    if op in ("linear", "gated_linear", "logits_head"):
        hints = {"gated": op == "gated_linear", "few_rows": op == "logits_head"}
        return table.pack_linear(weights["weight"], weights.get("bias"), **hints)
    if op == "rms_norm":
        return Norm(weights["weight"], floats["eps"], floats["offset"])
    if op == "mlp_block":
        return _mlp(table, weights, ints)
    if op == "attention":
        return _spec(weights, ints, floats)
    if op == "attention_block":
        return _attention(table, weights, ints, floats)
    if op == "decoder_layer":
        norms = {
            name: Norm(weights[name], floats["norm_eps"], floats["norm_offset"])
            for name in ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
            if name in weights
        }
        return LayerWeights(_attention(table, weights, ints, floats), _mlp(table, weights, ints), **norms)
    return None


def bind(
    op: str,
    table: OpTable,
    record: Any,
    tensors: Tensors,
    ints: Numbers,
    floats: Numbers,
    batch: AttentionBatch | None,
) -> Callable[[], Tensors]:
    """A function that makes the call on copies of what it writes, and gives outputs and inouts by slot.

    ``tensors`` are read at every call.
    """
    if op == "rope":
        return lambda: {"x": table.rope(tensors["x"].clone(), tensors["cos"], tensors["sin"])}
    kv = None
    if "keys" in tensors:
        kv = _cache(tensors["keys"], tensors["values"], int(ints["block_size"]))
    call = _call(op, table, record, tensors, ints, floats, kv, batch)

    def run() -> Tensors:
        found = {"out": call()}
        if kv is not None:
            found |= {"keys": kv.keys, "values": kv.values}
        return found

    return run


def _call(
    op: str,
    table: OpTable,
    record: Any,
    tensors: Tensors,
    ints: Numbers,
    floats: Numbers,
    kv: LayerKV | None,
    batch: AttentionBatch | None,
) -> Callable[[], Tensor]:
    get = tensors.get
    if op == "activation_and_mul":
        return lambda: table.activation_and_mul(tensors["x"], ACTIVATIONS[ints["activation"]])
    if op == "gated_linear":
        return lambda: table.gated_linear(tensors["x"], record, ACTIVATIONS[ints["activation"]])
    if op == "logits_head":
        return lambda: table.logits_head(tensors["x"], record, floats["softcap"] or None)
    if op == "rms_norm":
        return lambda: table.rms_norm(tensors["x"], record)
    if op == "linear":
        return lambda: table.linear(tensors["x"], record, get("residual"))
    if op == "mlp_block":
        return lambda: table.mlp_block(tensors["x"], record, get("residual"))
    assert kv is not None and batch is not None, op
    if op == "attention":
        return lambda: table.attention(tensors["q"], tensors["k"], tensors["v"], kv, batch, record)
    if op == "attention_block":
        return lambda: table.attention_block(
            tensors["x"], record, tensors["cos"], tensors["sin"], kv, batch, get("residual")
        )
    assert op == "decoder_layer", op
    return lambda: table.decoder_layer(tensors["x"], record, tensors["cos"], tensors["sin"], kv, batch)


def _cache(keys: Tensor, values: Tensor, block_size: int) -> LayerKV:
    heads, slots, head_dim = keys.shape
    kv = LayerKV.allocate(
        slots // block_size, block_size, heads, head_dim, values.shape[2], keys.dtype, keys.device
    )
    kv.keys.copy_(keys)
    kv.values.copy_(values)
    return kv


def _spec(weights: Tensors, ints: Numbers, floats: Numbers) -> AttentionSpec:
    return AttentionSpec(
        num_heads=ints["num_heads"],
        num_kv_heads=ints["num_kv_heads"],
        head_dim=ints["head_dim"],
        v_head_dim=ints["v_head_dim"],
        scale=floats["scale"],
        sliding_window=ints["window"] or None,
        softcap=floats["softcap"] or None,
        sinks=weights.get("sinks"),
    )


def _attention(table: OpTable, weights: Tensors, ints: Numbers, floats: Numbers) -> AttentionWeights:
    norms = {
        name: Norm(weights[name], floats["qk_norm_eps"], floats["qk_norm_offset"])
        for name in ("q_norm", "k_norm")
        if name in weights
    }
    return AttentionWeights(
        table.pack_linear(weights["qkv"], weights.get("qkv_bias")),
        table.pack_linear(weights["o"], weights.get("o_bias")),
        _spec(weights, ints, floats),
        norms.get("q_norm"),
        norms.get("k_norm"),
        bool(ints["qk_norm_full"]),
    )


def _mlp(table: OpTable, weights: Tensors, ints: Numbers) -> MLPWeights:
    gate_up: PackedLinear = table.pack_linear(weights["gate_up"], weights.get("gate_up_bias"), gated=True)
    down = table.pack_linear(weights["down"], weights.get("down_bias"))
    return MLPWeights(gate_up, down, ACTIVATIONS[ints["activation"]])


def _taking_blocks(table: OpTable, weights: Tensors, in_blocks: Mapping[str, TensorSpec]) -> OpTable:
    """``table``, which keeps buffers of blocks as they are."""
    matrices = {weights[slot].data_ptr(): spec.matrix for slot, spec in in_blocks.items()}

    def pack(weight: Tensor, bias: Tensor | None = None, **hints: bool) -> PackedLinear:
        if weight.dtype is not torch.uint8:
            return table.pack_linear(weight, bias, **hints)
        rows, in_features = matrices[weight.data_ptr()]
        return PackedLinear("blocks", in_features, rows, weight, bias, dtype=torch.bfloat16)

    return table.replace(pack_linear=pack)


def narrowed(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """float32 tensors as copies in ``dtype``, others as they are."""
    return {name: each.to(dtype) if each.dtype is torch.float32 else each for name, each in tensors.items()}


def any_rows_wide(pack: str) -> bool:
    """Whether with the pack in this folder steps of any number of rows are float32."""
    return bool(pack) and any(entry.batch_invariant for entry in read_manifest(Path(pack))[0].kernels)


def widened(tensors: Tensors) -> Tensors:
    """Floating-point tensors as float64 copies, others as they are."""
    return {name: each.double() if each.is_floating_point() else each for name, each in tensors.items()}


def stock_table(weight_dtype: str) -> OpTable:
    return OpTable.stock("cpu", getattr(torch, weight_dtype))


def with_pack(table: OpTable, folder: Path, op: str, record: Any, softcap: float) -> OpTable:
    """``table`` with the ops of a pack, prepared for one set of weights: ``record`` as ``op`` is called with.

    Raises PackError.
    """
    manifest, pack_id = read_manifest(folder)
    libraries = build_pack(folder, manifest, default_build_folder())
    store, ops = WeightStore(), dict[str, Any]()
    for entry, library in zip(manifest.kernels, libraries, strict=True):
        native = make_op(NativeKernel(library), entry, ops.get(entry.op) or table.unbound(entry.op))
        for found in _sets(entry.op, op, record, softcap):
            native.bind(found, store)
        ops[entry.op] = native
    return table.replace(source=pack_id, **ops)


def _sets(op: str, called: str, record: Any, softcap: float) -> list[WeightSet]:
    """The weight sets that ``op`` is called with inside one call of ``called``."""
    if isinstance(record, LayerWeights) and op != "logits_head":
        layers = DecoderWeights([record], Norm(torch.ones(1), 0.0), record.mlp.down)
        return weight_sets(op, layers)
    if isinstance(record, AttentionWeights):
        parts = {
            "attention_block": [attention_block_set(record)],
            "attention": [attention_set(record.spec)],
            "linear": [linear_set(record.qkv), linear_set(record.out)],
        }
        return parts.get(op, [])
    if isinstance(record, MLPWeights):
        parts = {
            "mlp_block": [mlp_set(record)],
            "gated_linear": [gated_set(record.gate_up, record.activation)],
            "linear": [linear_set(record.gate_up), linear_set(record.down)],
        }
        return parts.get(op, [])
    if op != called:
        return []
    if isinstance(record, PackedLinear):
        return [linear_set(record, softcap if op == "logits_head" else None)] if op != "gated_linear" else []
    if isinstance(record, Norm):
        return [norm_set(record)]
    return [attention_set(record)] if isinstance(record, AttentionSpec) else []
