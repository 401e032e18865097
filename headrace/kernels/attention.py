"""Paged attention from stock operators.

    rows of the batch              how they attend
    decodes, near in length        one gather of their blocks, two batched products, one mask
    a lone decode with few keys    flash kernel on the cache itself, when its blocks are consecutive
    a lone decode with very many   two products a head on the cache itself, likewise
    prefill chunk                  tiles of queries (below)

A prefill chunk goes head by head and tile by tile: queries of one key head's group, (tile * group, keys)
scores in a scratch tensor that all tiles reuse, softmax over whole rows in place. Only the tile's last
columns are masked, and with a sliding window only the keys that the tile can see are touched; so work and
memory follow what is visible, and no mask is larger than a tile.

Where a CPU multiplies no bfloat16 (linear.py), products take a float32 copy of the keys and values they see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch, PrefillChunk
from headrace.kernels.cache import LayerKV
from headrace.kernels.linear import WIDENS
from headrace.kernels.plan import DecodeGroup, decode_plan, tile_mask, tile_rows
from headrace.kernels.weights import AttentionSpec

# up to here torch's flash kernel beats two products for a single row
_FLASH_KEYS = 768
# from here on copying a lone decode's keys costs more than the calls for its heads one by one
_COPY_KEYS = 8192

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec
) -> Tensor:
    """See ``reference.attention``."""
    write(k, v, kv, batch)
    tokens, num_decodes = q.shape[0], batch.num_decodes
    if num_decodes == tokens:
        return _decode(q, kv, batch, spec)
    out = q.new_empty(tokens, spec.num_heads * spec.v_head_dim)
    if num_decodes:
        out[:num_decodes] = _decode(q[:num_decodes], kv, batch, spec)
    for chunk in batch.prefills:
        _prefill(q[chunk.start : chunk.end], kv, chunk, batch, spec, out[chunk.start : chunk.end])
    return out


def write(k: Tensor, v: Tensor, kv: LayerKV, batch: AttentionBatch) -> None:
    """Stores k (tokens, heads, head_dim) and v (tokens, heads, v_head_dim) in the rows' slots."""
    joint, rows = kv.joint, _side_by_side(k, v)
    if joint is None or rows is None:
        kv.keys.index_copy_(1, batch.slot_mapping, k.transpose(0, 1).to(kv.keys.dtype))
        kv.values.index_copy_(1, batch.slot_mapping, v.transpose(0, 1).to(kv.values.dtype))
    elif k.shape[0] == 1:
        joint.select(1, batch.first_slot).copy_(rows.select(1, 0))
    else:
        joint.index_copy_(1, batch.slot_mapping, rows.to(joint.dtype))


def _side_by_side(k: Tensor, v: Tensor) -> Tensor | None:
    """k and v as one (2 * heads, tokens, dim) view, when both came out of one projection."""
    tokens, heads, dim = k.shape
    width = heads * dim
    beside = v.data_ptr() == k.data_ptr() + width * k.element_size()
    if not beside or v.shape != k.shape or k.stride(0) < 2 * width:
        return None
    return k.as_strided((2 * heads, tokens, dim), (dim, k.stride(0), 1))


def _decode(q: Tensor, kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
    """(decodes, heads, head_dim) → (decodes, heads * v_head_dim)."""
    groups = decode_plan(batch, spec.sliding_window, _product_dtype(kv.keys))
    if len(groups) == 1:
        return _decode_group(q, kv, groups[0], spec)
    out = q.new_empty(q.shape[0], spec.num_heads * spec.v_head_dim)
    for group in groups:
        out[group.rows] = _decode_group(q[group.rows], kv, group, spec)
    return out


def _decode_group(q: Tensor, kv: LayerKV, group: DecodeGroup, spec: AttentionSpec) -> Tensor:
    if group.first_slot is not None:
        if group.visible <= _FLASH_KEYS and _flash_takes(q, spec):
            return _decode_flash(q, kv, group, spec)
        if group.visible >= _COPY_KEYS:
            return _decode_by_head(q, kv, group, spec)
    return _decode_gathered(q, kv, group, spec)


def _decode_flash(q: Tensor, kv: LayerKV, group: DecodeGroup, spec: AttentionSpec) -> Tensor:
    """One row over consecutive slots, by torch's flash kernel: float32 scores, nothing copied."""
    assert group.first_slot is not None
    start, stop = group.first_slot, group.first_slot + group.visible
    rows = q.view(1, spec.num_kv_heads, -1, spec.head_dim).to(kv.keys.dtype)
    keys, values = kv.keys[None, :, start:stop], kv.values[None, :, start:stop]
    out: Tensor = _flash(rows, keys, values, 0.0, False, attn_mask=None, scale=spec.scale)[0]
    return out.reshape(1, -1).to(q.dtype)


def _decode_by_head(q: Tensor, kv: LayerKV, group: DecodeGroup, spec: AttentionSpec) -> Tensor:
    """One row over consecutive slots, key head by key head, nothing copied."""
    assert group.first_slot is not None
    start, stop = group.first_slot, group.first_slot + group.visible
    dtype = _product_dtype(kv.keys)
    rows = (q.view(spec.num_kv_heads, -1, spec.head_dim) * spec.scale).to(dtype)
    attended = []
    for head in range(spec.num_kv_heads):
        keys, values = kv.keys[head, start:stop].to(dtype), kv.values[head, start:stop].to(dtype)
        scores = _capped(torch.mm(rows[head], keys.t()), spec)
        attended.append(torch.mm(_softmax(scores, spec, head), values))
    return torch.cat(attended).view(1, -1).to(q.dtype)


def _decode_gathered(q: Tensor, kv: LayerKV, group: DecodeGroup, spec: AttentionSpec) -> Tensor:
    """Rows over a copy of their blocks, padded to the longest."""
    # (kv heads, rows * num_keys, dim)
    keys, values = (each.to(_product_dtype(each)) for each in kv.gather(group.blocks))
    count, kv_heads = q.shape[0], spec.num_kv_heads
    fan = spec.num_heads // kv_heads
    shape = (kv_heads * count, group.num_keys)
    rows = (q * spec.scale).to(keys.dtype)
    # (rows, kv heads, fan, dim) → (kv heads * rows, fan, dim)
    rows = rows.view(count, kv_heads, fan, spec.head_dim).transpose(0, 1)
    rows = rows.reshape(kv_heads * count, fan, spec.head_dim)
    scores = torch.bmm(rows, keys.view(*shape, spec.head_dim).transpose(1, 2))
    scores = _capped(scores, spec)
    if group.mask is not None:
        scores.view(kv_heads, count, fan, group.num_keys).add_(group.mask)
    if spec.sinks is None:
        weights = torch.softmax(scores, dim=-1, out=scores)
    else:
        sinks = spec.sinks.to(scores.dtype).view(kv_heads, 1, fan, 1).expand(-1, count, -1, -1)
        weights = torch.cat((scores, sinks.reshape(-1, fan, 1)), dim=-1).softmax(dim=-1)[..., :-1]
    out = torch.bmm(weights, values.view(*shape, spec.v_head_dim))
    out = out.view(kv_heads, count, fan, spec.v_head_dim).transpose(0, 1)
    return out.reshape(count, -1).to(q.dtype)


def _prefill(
    q: Tensor,
    kv: LayerKV,
    chunk: PrefillChunk,
    batch: AttentionBatch,
    spec: AttentionSpec,
    out: Tensor,
) -> None:
    """(queries, heads, head_dim) into ``out`` (queries, heads * v_head_dim)."""
    queries, kv_heads, dtype = q.shape[0], spec.num_kv_heads, _product_dtype(kv.keys)
    fan, window = spec.num_heads // kv_heads, spec.sliding_window
    length = chunk.context_len + queries
    # keys and values from position ``origin`` on, as seen through the window
    origin = 0 if window is None else max(0, chunk.context_len - window + 1)
    if chunk.first_slot is not None:
        start, stop = chunk.first_slot + origin, chunk.first_slot + length
        keys, values = kv.keys[:, start:stop], kv.values[:, start:stop]
    else:
        first_block = origin // batch.block_size
        origin = first_block * batch.block_size
        keys, values = kv.gather(chunk.block_table[first_block:])
    keys, values = keys.to(dtype), values.to(dtype)
    # (kv heads, queries, fan, head_dim): a tile's rows lie side by side
    rows = q.view(queries, kv_heads, fan, spec.head_dim).transpose(0, 1)
    rows = (rows * spec.scale).to(dtype, memory_format=torch.contiguous_format).contiguous()
    visible = length - origin if window is None else min(length - origin, window + queries)
    tile = tile_rows(queries, fan, visible, q.device)
    span = visible if window is None else min(visible, window + tile)
    scratch = rows.new_empty(tile * fan * span)
    result = out.view(queries, kv_heads, fan, spec.v_head_dim)
    for first in range(0, queries, tile):
        last = min(first + tile, queries)
        size = last - first
        end = chunk.context_len + last - origin
        begin = 0 if window is None else max(0, end - size - window + 1)
        width = end - begin
        mask, masked_from = tile_mask(batch, size, width, window, dtype)
        shape = (size * fan, width)
        for head in range(kv_heads):
            scores = torch.mm(
                rows[head, first:last].view(size * fan, spec.head_dim),
                keys[head, begin:end].t(),
                out=scratch[: shape[0] * width].view(shape),
            )
            scores = _capped(scores, spec)
            scores.view(size, fan, width)[..., masked_from:].add_(mask)
            weights = _softmax(scores, spec, head)
            attended = torch.mm(weights, values[head, begin:end])
            result[first:last, head] = attended.view(size, fan, spec.v_head_dim)


def _product_dtype(cached: Tensor) -> torch.dtype:
    """In what products with these keys or values are computed."""
    wide = WIDENS and cached.dtype is torch.bfloat16 and cached.device.type == "cpu"
    return torch.float32 if wide else cached.dtype


def _capped(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """Soft-capping in place."""
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return scores


def _softmax(scores: Tensor, spec: AttentionSpec, head: int) -> Tensor:
    """Softmax of (rows * fan, keys) in place, statistics in float32; a sink joins each row's sum."""
    if spec.sinks is None:
        return torch.softmax(scores, dim=-1, out=scores)
    sinks = spec.sinks.to(scores.dtype).view(spec.num_kv_heads, -1)[head]
    column = sinks.repeat(scores.shape[0] // sinks.shape[0])[:, None]
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[:, :-1]


def _flash_takes(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether the CPU flash kernel computes this rule."""
    return (
        q.device.type == "cpu"
        and spec.softcap is None
        and spec.sinks is None
        and spec.head_dim == spec.v_head_dim
    )
