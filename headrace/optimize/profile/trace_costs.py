"""What an op of a trace has to do, from the shapes and types of its inputs where they were recorded."""

from __future__ import annotations

import math
from typing import Any

from headrace.optimize.profile.costs import Cost
from headrace.optimize.profile.trace_events import Node

_TYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Half": ("float16", 2),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "int": ("int32", 4),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
}
# where in its inputs a product finds its two factors
_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "matmul": 0,
    "_scaled_mm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "_addmm_activation": 1,
}
_LINEARS = ("linear", "_linear_pointwise", "linear_dynamic_fp16", "_weight_int8pack_mm")
_LOOKUPS = ("embedding", "index_select", "index", "gather")
_VIEWS = {
    "view", "reshape", "t", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "expand",
    "narrow", "chunk", "split", "split_with_sizes", "unbind", "alias", "detach", "detach_", "as_strided",
    "empty", "empty_like", "empty_strided", "unflatten", "flatten", "_unsafe_view", "lift_fresh", "resize_",
    "size", "item", "_local_scalar_dense", "is_nonzero", "result_type", "view_as", "expand_as", "movedim",
}  # fmt: skip

Tensor = tuple[tuple[int, ...], str, int]  # shape, dtype, bytes an element


def short_name(name: str) -> str:
    """``aten::mm`` is mm, ``vllm::unified_attention`` unified_attention."""
    return name.rpartition("::")[2] or name


def node_cost(node: Node) -> Cost | None:
    """The cost of an op; None where the trace does not say enough.

    Products and attention by their shapes, lookups by what they fetch, views nothing; any other op reads its
    inputs and writes as much as the largest of them.
    """
    tensors = _tensors(node.arguments)
    if not tensors:
        return None
    name = short_name(node.name)
    if name in _VIEWS:
        return None
    if name in _PRODUCTS and len(tensors) > _PRODUCTS[name] + 1:
        return _product(tensors[_PRODUCTS[name] :], transposed=False)
    if name in _LINEARS and len(tensors) > 1:
        return _product(tensors, transposed=True)
    if "scaled_dot_product" in name and len(tensors) > 2:
        return _attention(tensors, node.arguments)
    shape, dtype, itemsize = tensors[0]
    rows = math.prod(shape[:-1])
    if name in _LOOKUPS and len(tensors) > 1:
        fetched = math.prod(tensors[1][0]) * (shape[-1] if shape else 1)
        dims = {"hidden_size": shape[-1] if shape else 1}
        return Cost(math.prod(tensors[1][0]), dtype, dims, 0.0, 2.0 * fetched * itemsize)
    sizes = [math.prod(each) * width for each, _, width in tensors]
    flops = float(max(math.prod(each) for each, _, _ in tensors))
    dims = {"size": shape[-1] if shape else 1}
    return Cost(rows, dtype, dims, flops, float(sum(sizes) + max(sizes)))


def _product(tensors: list[Tensor], *, transposed: bool) -> Cost | None:
    (left, dtype, itemsize), (right, _, right_size) = tensors[0], tensors[1]
    if len(left) < 1 or len(right) < 2:
        return None
    rows, inner = math.prod(left[:-1]), left[-1]
    columns = right[-2] if transposed else right[-1]
    flops = 2.0 * rows * inner * columns
    weight = float(math.prod(right) * right_size)
    moved = rows * inner * itemsize + weight + rows * columns * itemsize
    # a factor with batch dimensions is an activation, a matrix most likely a weight
    resident = weight if len(right) == 2 else 0.0
    return Cost(rows, dtype, {"in_features": inner, "out_features": columns}, flops, moved, resident)


def _attention(tensors: list[Tensor], arguments: dict[str, Any]) -> Cost | None:
    """Query, key and value of (batch, heads, tokens, dim)."""
    (q, dtype, itemsize), (k, _, _), (v, _, _) = tensors[:3]
    if not len(q) == len(k) == len(v) == 4:
        return None
    batch, heads, queries, dim = q
    keys, v_dim = k[2], v[3]
    pairs = float(batch * heads * queries * keys)
    if "True" in map(str, arguments.get("Concrete Inputs", [])) and queries == keys:  # is_causal
        pairs *= (keys + 1) / (2 * keys)
    cache = float((math.prod(k) + math.prod(v)) * itemsize)
    moved = itemsize * (math.prod(q) + batch * heads * queries * v_dim) + cache
    dims = {"num_heads": heads, "num_kv_heads": k[1], "head_dim": dim, "v_head_dim": v_dim}
    return Cost(
        batch * queries, dtype, dims, 2.0 * pairs * (dim + v_dim), moved, cache, max(0, keys - queries)
    )


def _tensors(arguments: dict[str, Any]) -> list[Tensor]:
    """The inputs that are tensors, those in lists included."""
    found: list[Tensor] = []
    types, shapes = arguments.get("Input type", []), arguments.get("Input Dims", [])
    for kind, shape in zip(types, shapes, strict=False):
        if kind in _TYPES and isinstance(shape, list):
            found.append((tuple(shape), *_TYPES[kind]))
        elif kind == "TensorList":
            found += [(tuple(each), "float32", 4) for each in shape if isinstance(each, list)]
    return found
