"""Native ops that know the step's batch: attention, attention_block, decoder_layer."""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from headrace.core.packs import KernelEntry
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.native.abi import SHAPE, STRIDE, TENSOR_WORDS, Call
from headrace.kernels.native.base import Bound, NativeOp
from headrace.kernels.native.library import NativeKernel
from headrace.kernels.weights import AttentionSpec, AttentionWeights, LayerWeights

_TURNS = 4
_TURN_ROWS = 64
"""With more rows, memory of its own for each result costs nothing beside the work."""


class BatchOp(NativeOp):
    """An op whose call knows the step's batch; the step's own slots are written once and copied."""

    def __init__(self, kernel: NativeKernel, entry: KernelEntry, fallback: Callable[..., Tensor]) -> None:
        super().__init__(kernel, entry, fallback)
        step = self._step = Call(self.signature)
        step.set_array("slot_mapping", 0, "int64", (0,), (1,))
        step.set_array("block_tables", 0, "int64", (0, 0), (0, 1))
        step.set_array("lens", 0, "int64", (0,), (1,))
        self._slots = step.tensor_word("slot_mapping")
        self._tables = step.tensor_word("block_tables")
        self._lens = step.tensor_word("lens")
        self._from, self._to = self._slots, step.tensor_word("chunk_tables") + TENSOR_WORDS
        self._region = step.words[self._from : self._to]
        self._block_size = step.int_word("block_size")
        self._num_decodes = step.int_word("num_decodes")
        has_angles = "cos" in self.signature.names()
        self._cos = step.tensor_word("cos") if has_angles else 0
        self._sin = step.tensor_word("sin") if has_angles else 0
        self._per_row = [self._x, self._out, self._cos, self._sin]
        self._per_row += [self._residual] if self._residual else []
        self._batch: AttentionBatch | None = None
        self._chunks: tuple[Tensor, Tensor] | None = None

    def _block_op(
        self,
        owner: object,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """(rows, in) → (rows, out), or None when it is not covered."""
        bound = self._sets.get(id(owner))
        dtype = x.dtype
        if bound is None or dtype not in self._dtypes:
            return None
        rows, width = x.shape
        if rows == 0 or width != bound.in_features or cos.dtype is not dtype or not self._takes(batch, rows):
            return None
        if not (cos.is_contiguous() and sin.is_contiguous()):
            return None
        x = x if x.is_contiguous() else x.contiguous()
        if bound.out_features == width:
            out = torch.empty_like(x)
        else:
            out = torch.empty(rows, bound.out_features, dtype=dtype)
        words = bound.words
        layout = (dtype, cos.shape[-1])
        if bound.layout != layout:
            bound.layout, bound.rows = layout, rows
            for name, tensor in (("x", x), ("out", out), ("cos", cos), ("sin", sin)):
                bound.call.set_tensor(name, tensor)
            if self._residual:
                bound.call.set_tensor("residual", out)
        elif bound.rows != rows:
            self._set_rows(bound, rows)
        words[self._x] = x.data_ptr()
        words[self._out] = out.data_ptr()
        words[self._cos] = cos.data_ptr()
        words[self._sin] = sin.data_ptr()
        if residual is not None:
            if residual.shape != out.shape or residual.dtype is not dtype:
                return None
            residual = residual.contiguous()  # a copy lives until the call is done
        if self._residual:
            words[self._residual] = 0 if residual is None else residual.data_ptr()
        self._point_at_step(bound, kv, batch)
        return out if self._compute(bound) else None

    def _set_rows(self, bound: Bound, rows: int) -> None:
        """Of a call that is laid out already: everything is dense, so that nothing else changes."""
        bound.rows = rows
        for place in self._per_row:
            bound.words[place + SHAPE] = rows

    def _takes(self, batch: AttentionBatch, rows: int) -> bool:
        covered = self._decode if batch.num_decodes == rows else self._prefill
        return covered and rows <= self._max_rows

    def _point_at_step(self, bound: Bound, kv: LayerKV, batch: AttentionBatch) -> None:
        if batch is not self._batch:
            self._lay_out(batch)
        words = bound.words
        if kv is not bound.kv:
            bound.kv = kv
            bound.call.set_tensor("keys", kv.keys)
            bound.call.set_tensor("values", kv.values)
        words[self._from : self._to] = self._region
        words[self._block_size] = batch.block_size
        words[self._num_decodes] = batch.num_decodes

    def _lay_out(self, batch: AttentionBatch) -> None:
        """The step's slots, from slot_mapping to chunk_tables."""
        words, tables = self._step.words, batch.decode_block_tables
        count, width = tables.shape
        words[self._slots] = batch.slot_mapping.data_ptr()
        words[self._slots + SHAPE] = batch.num_tokens
        words[self._tables] = tables.data_ptr()
        words[self._tables + SHAPE] = count
        words[self._tables + SHAPE + 1] = words[self._tables + STRIDE] = width
        words[self._lens] = batch.decode_lens.data_ptr()
        words[self._lens + SHAPE] = count
        self._chunks = batch.memo("native_chunks", lambda: _chunk_tensors(batch)) if batch.prefills else None
        chunks, chunk_tables = self._chunks or (None, None)
        self._step.set_tensor("chunks", chunks)
        self._step.set_tensor("chunk_tables", chunk_tables)
        self._batch = batch


class Attention(BatchOp):
    """q, k and v keep their strides: they lie side by side as one projection made them."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        out = self._covered(q, k, v, kv, batch, spec)
        return self._fallback(q, k, v, kv, batch, spec) if out is None else out

    def _covered(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor | None:
        bound = self._sets.get(id(spec))
        rows, dtype = q.shape[0], q.dtype
        if bound is None or rows == 0 or dtype not in self._dtypes or not self._takes(batch, rows):
            return None
        if k.dtype is not dtype or v.dtype is not dtype:
            return None
        out = q.new_empty(rows, bound.out_features)
        layout = (rows, q.stride(), k.stride(), v.stride())
        call, words = bound.call, bound.words
        if bound.rows != layout or bound.dtype is not dtype:
            if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
                return None
            bound.rows, bound.dtype = layout, dtype
            for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
                call.set_tensor(name, tensor)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            words[call.tensor_word(name)] = tensor.data_ptr()
        words[self._out] = out.data_ptr()
        self._point_at_step(bound, kv, batch)
        return out if self._compute(bound) else None


class AttentionBlock(BatchOp):
    def __call__(
        self,
        ops: Any,
        x: Tensor,
        weights: AttentionWeights,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = self._block_op(weights, x, cos, sin, kv, batch, residual)
        return self._fallback(ops, x, weights, cos, sin, kv, batch, residual) if out is None else out


class DecoderLayer(BatchOp):
    """A step's layers follow each other: each gets what the one before gave, with the same batch and angles.
    In such a call only pointers are written, and with few rows what it gives lies in one of a few tensors
    that take turns: one that nobody refers to any more. (A view alone does not keep what it shows.)"""

    def __init__(self, kernel: NativeKernel, entry: KernelEntry, fallback: Callable[..., Tensor]) -> None:
        super().__init__(kernel, entry, fallback)
        self._given: Tensor | None = None  # by the last call, at the address ``_given_at``
        self._given_at = 0
        self._layout: Any = None  # of the last call
        self._rows = 0
        self._angles: dict[int, tuple[Tensor, Tensor, int, int]] = {}  # of the step, by id of cos
        self._angles_of: AttentionBatch | None = None
        self._turns: list[tuple[Tensor, int]] = []
        self._turns_for: Any = None

    def __call__(
        self,
        ops: Any,
        x: Tensor,
        layer: LayerWeights,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
    ) -> Tensor:
        bound = self._sets.get(id(layer))
        if bound is not None and x is self._given and batch is self._batch:
            angles = self._angles.get(id(cos))
            if angles is not None and angles[1] is sin and bound.layout == self._layout:
                out = self._next(bound, x, angles, kv, batch)
                return self._fallback(ops, x, layer, cos, sin, kv, batch) if out is None else out
        out = self._block_op(layer, x, cos, sin, kv, batch)
        if out is None or bound is None:
            return self._fallback(ops, x, layer, cos, sin, kv, batch)
        self._remember(bound, out, cos, sin, batch)
        return out

    def _next(
        self,
        bound: Bound,
        x: Tensor,
        angles: tuple[Tensor, Tensor, int, int],
        kv: LayerKV,
        batch: AttentionBatch,
    ) -> Tensor | None:
        """The call of a layer after another of the same step; None when it is not covered."""
        if bound.rows != self._rows:
            self._set_rows(bound, self._rows)
        out, address = self._turn(x)
        words = bound.words
        words[self._x], words[self._out] = self._given_at, address
        words[self._cos], words[self._sin] = angles[2], angles[3]
        self._point_at_step(bound, kv, batch)
        if not self._compute_again(bound):
            return None
        self._given, self._given_at = out, address
        return out

    def _remember(self, bound: Bound, out: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch) -> None:
        words = bound.words
        if self._angles_of is not batch:
            self._angles.clear()
            self._angles_of = batch
        self._angles[id(cos)] = (cos, sin, words[self._cos], words[self._sin])
        # a layer of another width would need other tensors, and goes the long way
        self._given = out if bound.in_features == bound.out_features else None
        self._given_at, self._layout, self._rows = words[self._out], bound.layout, bound.rows

    def _turn(self, like: Tensor) -> tuple[Tensor, int]:
        """A tensor as ``like`` to write to, and its address."""
        if self._rows > _TURN_ROWS:
            out = torch.empty_like(like)
            return out, out.data_ptr()
        if self._turns_for != (self._rows, self._layout):
            self._turns.clear()
            self._turns_for = (self._rows, self._layout)
        for out, address in self._turns:
            if getrefcount(out) == 3:  # the list's, ours, and the question's own
                return out, address
        out = torch.empty_like(like)
        if len(self._turns) < _TURNS:
            self._turns.append((out, out.data_ptr()))
        return out, out.data_ptr()


def _chunk_tensors(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """chunks (num_prefills, 3) and their block tables padded with block 0, both int64."""
    chunks = [(chunk.start, chunk.end, chunk.context_len) for chunk in batch.prefills]
    width = max(chunk.block_table.shape[0] for chunk in batch.prefills)
    tables = torch.zeros(len(chunks), width, dtype=torch.int64)
    for row, chunk in zip(tables, batch.prefills, strict=True):
        row[: chunk.block_table.shape[0]] = chunk.block_table
    return torch.tensor(chunks, dtype=torch.int64), tables
