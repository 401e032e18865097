"""Shapes and dtypes of every slot of an op, from a target's dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.block_layout import BLOCK_SIZES, TYPES, lay_out
from headrace.kernels.native.signature import SIGNATURES
from headrace.optimize.judge.problem import TensorSpec

Shape = tuple[int, ...]


def weight_shapes(op: str, dims: Mapping[str, int]) -> dict[str, Shape]:
    """Weight slots, optional ones included."""
    if op in ("linear", "logits_head"):
        return {"weight": (dims["out_features"], dims["in_features"]), "bias": (dims["out_features"],)}
    if op == "gated_linear":
        rows = 2 * dims["out_features"]
        return {"weight": (rows, dims["in_features"]), "bias": (rows,)}
    if op == "rms_norm":
        return {"weight": (dims["size"],)}
    found: dict[str, Shape] = {}
    if op in ("attention", "attention_block", "decoder_layer"):
        found |= {"sinks": (dims["num_heads"],)}
    if op in ("attention_block", "decoder_layer"):
        found |= _attention_weights(dims)
    if op in ("mlp_block", "decoder_layer"):
        hidden, inner = dims["hidden_size"], dims["intermediate_size"]
        found |= {"gate_up": (2 * inner, hidden), "gate_up_bias": (2 * inner,)}
        found |= {"down": (hidden, inner), "down_bias": (hidden,)}
    if op == "decoder_layer":
        for name in ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"):
            found[name] = (dims["hidden_size"],)
    return found


MATRICES = ("weight", "qkv", "o", "gate_up", "down")


def weight_specs(
    op: str,
    dims: Mapping[str, int],
    present: frozenset[str],
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None = None,
    formats: Sequence[str] = (),
) -> list[TensorSpec]:
    """The weight slots that the model's call fills, in the signature's order.

    ``norm_dtype`` None: as the others. ``formats`` of the matrices where these are in blocks.
    """
    shapes = weight_shapes(op, dims)
    found = []
    for slot in SIGNATURES[op].slots:
        if slot.role != "weight" or (slot.optional and slot.name not in present):
            continue
        shape, kind = shapes[slot.name], dtype
        if slot.name in MATRICES and op != "rms_norm" and formats:
            found.append(_in_blocks(slot.name, shape, dims, formats))
            continue
        if norm_dtype is not None and (op == "rms_norm" or slot.name.endswith("_norm")):
            kind = norm_dtype
        found.append(TensorSpec(slot.name, slot.role, kind, shape))
    return found


def _in_blocks(slot: str, shape: Shape, dims: Mapping[str, int], formats: Sequence[str]) -> TensorSpec:
    """Queries and keys in the first format and values in the last, as files that mix formats have them; what
    leads down in the last, all else in the first. Formats whose blocks do not divide rows are left out."""
    rows, in_features = shape
    formats = [name for name in formats if in_features % BLOCK_SIZES[TYPES[name]][0] == 0]
    assert formats, f"no format's blocks divide rows of {in_features}"
    parts = [(formats[-1] if slot == "down" else formats[0], rows)]
    if slot == "qkv":
        heads, kv_heads, width = dims["num_heads"], dims["num_kv_heads"], dims["head_dim"]
        sizes = (heads * width, kv_heads * width, kv_heads * dims["v_head_dim"])
        parts = list(zip((formats[0], formats[0], formats[-1]), sizes, strict=True))
    if slot == "gate_up":
        parts = [(formats[0], rows // 2)] * 2
    _, nbytes = lay_out(parts, in_features)
    return TensorSpec(slot, "weight", torch.uint8, (nbytes,), None, tuple(parts), (rows, in_features))


def call_specs(
    op: str,
    dims: Mapping[str, int],
    present: frozenset[str],
    rows: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    batch: AttentionBatch | None,
    num_blocks: int,
) -> list[TensorSpec]:
    """All slots of one call but its weights, in the signature's order; absent ones left out.

    ``dtype`` is that of activations; ``batch`` and ``num_blocks`` (in the cache) are for ops that attend.
    """
    shapes = _activation_shapes(op, dims, rows)
    if batch is not None:
        shapes |= _cache_shapes(dims, batch, num_blocks)
    found = []
    for slot in SIGNATURES[op].slots:
        if slot.role == "weight" or slot.name not in shapes:
            continue
        if slot.name == "residual" and slot.name not in present:
            continue
        kind = dtype
        if slot.name in ("slot_mapping", "block_tables", "lens", "chunks", "chunk_tables"):
            kind = torch.int64
        elif slot.name in ("keys", "values"):
            kind = cache_dtype
        elif op == "logits_head" and slot.name == "out":
            kind = torch.float32
        shape = shapes[slot.name]
        found.append(TensorSpec(slot.name, slot.role, kind, shape, _stride(op, slot.name, shape, dims)))
    return found


def _attention_weights(dims: Mapping[str, int]) -> dict[str, Shape]:
    heads, kv_heads = dims["num_heads"], dims["num_kv_heads"]
    width, v_width, hidden = dims["head_dim"], dims["v_head_dim"], dims["hidden_size"]
    qkv = (heads + kv_heads) * width + kv_heads * v_width
    full = bool(dims["qk_norm_full"])
    return {
        "qkv": (qkv, hidden),
        "qkv_bias": (qkv,),
        "o": (hidden, heads * v_width),
        "o_bias": (hidden,),
        "q_norm": (heads * width if full else width,),
        "k_norm": (kv_heads * width if full else width,),
    }


def _activation_shapes(op: str, dims: Mapping[str, int], rows: int) -> dict[str, Shape]:
    if op in ("linear", "logits_head", "gated_linear"):
        out = (rows, dims["out_features"])
        shapes: dict[str, Shape] = {"x": (rows, dims["in_features"]), "out": out}
        return shapes | ({"residual": out} if op == "linear" else {})
    if op == "rms_norm":
        return {"x": (rows, dims["size"]), "out": (rows, dims["size"])}
    if op == "activation_and_mul":
        inner = dims["intermediate_size"]
        return {"x": (rows, 2 * inner), "out": (rows, inner)}
    if op == "attention":
        heads, kv_heads = dims["num_heads"], dims["num_kv_heads"]
        return {
            "q": (rows, heads, dims["head_dim"]),
            "k": (rows, kv_heads, dims["head_dim"]),
            "v": (rows, kv_heads, dims["v_head_dim"]),
            "out": (rows, heads * dims["v_head_dim"]),
        }
    if op == "rope":
        angles = (rows, 1, dims["rotary_dim"])
        return {"x": (rows, dims["num_heads"], dims["head_dim"]), "cos": angles, "sin": angles}
    row = (rows, dims["hidden_size"])
    if op == "mlp_block":
        return {"x": row, "residual": row, "out": row}
    angles = (rows, 1, dims["rotary_dim"])
    return {"x": row, "cos": angles, "sin": angles, "residual": row, "out": row}


def _cache_shapes(dims: Mapping[str, int], batch: AttentionBatch, num_blocks: int) -> dict[str, Shape]:
    slots = num_blocks * dims["block_size"]
    shapes: dict[str, Shape] = {
        "keys": (dims["num_kv_heads"], slots, dims["head_dim"]),
        "values": (dims["num_kv_heads"], slots, dims["v_head_dim"]),
        "slot_mapping": (batch.num_tokens,),
        "block_tables": tuple(batch.decode_block_tables.shape),
        "lens": (batch.num_decodes,),
    }
    if batch.prefills:
        width = max(len(chunk.block_table) for chunk in batch.prefills)
        shapes |= {"chunks": (len(batch.prefills), 3), "chunk_tables": (len(batch.prefills), width)}
    return shapes


def _stride(op: str, slot: str, shape: Shape, dims: Mapping[str, int]) -> Shape | None:
    """q, k, v and what rope turns are parts of wider rows, those of the qkv product."""
    if (op, slot) == ("rope", "x"):
        return (shape[1] * shape[2] + dims["head_dim"], shape[2], 1)
    if op == "attention" and slot in ("q", "k", "v"):
        heads, kv_heads = dims["num_heads"], dims["num_kv_heads"]
        row = (heads + kv_heads) * dims["head_dim"] + kv_heads * dims["v_head_dim"]
        return (row, shape[2], 1)
    return None
