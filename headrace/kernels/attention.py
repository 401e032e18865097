"""Paged attention from stock operators.

    rows of the batch                 how they attend
    decodes, near in length           one gather of their blocks, two batched products, one mask
    a lone decode, few keys           flash kernel on the cache itself, when its blocks are consecutive
    a lone decode, many keys          two products a head on the cache itself, likewise
    prefill chunk                     tiles of queries (below)

A prefill chunk goes head by head and tile by tile: queries of one key head's group, (tile * group, keys)
scores in a scratch tensor that all tiles reuse, softmax over whole rows in place. Only the tile's last
columns are masked, and with a sliding window only the keys that the tile can see are touched; so work and
memory follow what is visible, and no mask is larger than a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch, PrefillChunk
from headrace.kernels.cache import LayerKV
from headrace.kernels.plan import DecodeGroup, decode_plan, tile_mask, tile_rows
from headrace.kernels.weights import AttentionSpec

# up to here torch's flash kernel beats two products for a single row
_FLASH_KEYS = 320

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
    tokens, heads, dim = k.shape
    slots = batch.slot_mapping
    joint = kv.joint
    if joint is not None and v.data_ptr() == k.data_ptr() + heads * dim * k.element_size():
        # both came out of one projection, side by side: one copy
        rows = k.as_strided((2 * heads, tokens, dim), (dim, k.stride(0), 1))
        if tokens == 1:
            joint.select(1, batch.first_slot).copy_(rows.select(1, 0))
        else:
            joint.index_copy_(1, slots, rows if rows.dtype is joint.dtype else rows.to(joint.dtype))
        return
    kv.keys.index_copy_(1, slots, k.transpose(0, 1).to(kv.keys.dtype))
    kv.values.index_copy_(1, slots, v.transpose(0, 1).to(kv.values.dtype))


def _decode(q: Tensor, kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
    """(decodes, heads, head_dim) → (decodes, heads * v_head_dim)."""
    groups = decode_plan(batch, spec.sliding_window, kv.keys.dtype)
    if len(groups) == 1:
        return _decode_group(q, kv, groups[0], spec)
    out = q.new_empty(q.shape[0], spec.num_heads * spec.v_head_dim)
    for group in groups:
        out[group.rows] = _decode_group(q[group.rows], kv, group, spec)
    return out


def _decode_group(q: Tensor, kv: LayerKV, group: DecodeGroup, spec: AttentionSpec) -> Tensor:
    count, kv_heads = q.shape[0], spec.num_kv_heads
    fan = spec.num_heads // kv_heads
    dtype = kv.keys.dtype
    if group.first_slot is not None:
        start, stop = group.first_slot, group.first_slot + group.num_keys
        if group.num_keys <= _FLASH_KEYS and _flash_takes(q, spec):
            rows = q.view(1, kv_heads, fan, spec.head_dim).to(dtype)
            keys, values = kv.keys[None, :, start:stop], kv.values[None, :, start:stop]
            out: Tensor = _flash(rows, keys, values, 0.0, False, attn_mask=None, scale=spec.scale)[0]
            return out.reshape(1, -1).to(q.dtype)
        rows = (q.view(kv_heads, fan, spec.head_dim) * spec.scale).to(dtype)
        out = torch.cat(
            [
                torch.mm(
                    _weights(torch.mm(rows[head], kv.keys[head, start:stop].t()), None, spec, head),
                    kv.values[head, start:stop],
                )
                for head in range(kv_heads)
            ]
        )
        return out.view(1, -1).to(q.dtype)
    keys, values = kv.gather(group.blocks)
    shape = (kv_heads * count, group.num_keys)
    rows = (q * spec.scale).to(dtype)
    # (decodes, kv heads, fan, dim) → (kv heads * decodes, fan, dim)
    rows = rows.view(count, kv_heads, fan, spec.head_dim).transpose(0, 1)
    rows = rows.reshape(kv_heads * count, fan, spec.head_dim)
    scores = torch.bmm(rows, keys.view(*shape, spec.head_dim).transpose(1, 2))
    weights = _weights(scores, group.mask, spec, None)
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
    queries, kv_heads, dtype = q.shape[0], spec.num_kv_heads, kv.keys.dtype
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
            if spec.softcap is not None:
                scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
            scores.view(size, fan, width)[..., masked_from:].add_(mask)
            weights = _softmax(scores, spec, head)
            attended = torch.mm(weights, values[head, begin:end])
            result[first:last, head] = attended.view(size, fan, spec.v_head_dim)


def _weights(scores: Tensor, mask: Tensor | None, spec: AttentionSpec, head: int | None) -> Tensor:
    """Scores, already scaled, (…, fan, keys) → softmax weights; may overwrite them."""
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if mask is not None:
        kv_heads = spec.num_kv_heads
        scores.view(kv_heads, -1, *scores.shape[1:]).add_(mask)
    if spec.sinks is None or head is not None:
        return _softmax(scores, spec, head if head is not None else 0)
    count = scores.shape[0] // spec.num_kv_heads
    sinks = spec.sinks.to(scores.dtype).view(spec.num_kv_heads, 1, -1, 1)
    sinks = sinks.expand(-1, count, -1, -1).reshape(*scores.shape[:2], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


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
