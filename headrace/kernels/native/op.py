"""Native kernels as ops of the table.

An op knows the weights that it was prepared for by the identity of the record that a call comes with
(weight_sets.py). What it does not cover goes to ``fallback``, the op that the table had before:

    more rows than it was judged for, another dtype, another phase, weights it does not know, HR_NOT_MINE

One thread may call an op at a time: each set of weights has one call laid out in advance (abi.py), in which
only pointers change, and shapes when the number of rows does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from headrace.core.errors import EngineError, NothingCoveredError, PackError
from headrace.core.packs import KernelEntry
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.native.abi import (
    DONE,
    DTYPES,
    NOT_MINE,
    SHAPE,
    STRIDE,
    TENSOR_WORDS,
    THREADS_WORD,
    Call,
    counts_word,
)
from headrace.kernels.native.library import NativeKernel
from headrace.kernels.native.signature import ACTIVATIONS, SIGNATURES
from headrace.kernels.native.store import WeightStore
from headrace.kernels.native.weight_sets import WeightSet, weight_sets
from headrace.kernels.weights import (
    AttentionSpec,
    AttentionWeights,
    DecoderWeights,
    LayerWeights,
    MLPWeights,
    Norm,
    PackedLinear,
)

__all__ = ["NativeKernel", "NativeOp", "make_op"]

_ANY = 1 << 62
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


class _Bound:
    """One set of weights with its call. ``rows``, ``dtype`` and ``kv`` are what the call is written for."""

    __slots__ = ("address", "call", "dtype", "held", "in_features", "kv", "out_features", "rows", "words")

    def __init__(self, call: Call, found: WeightSet | None, held: tuple[Any, ...]) -> None:
        self.call = call
        self.words = call.words
        self.address = call.address
        self.held = held
        self.in_features = found.in_features if found else 0
        self.out_features = found.out_features if found else 0
        self.rows: Any = -1
        self.dtype: torch.dtype | None = None
        self.kv: LayerKV | None = None


class NativeOp:
    """One op of the table, computed by a kernel where its entry says so. ``prepare`` it before use.

    ``nbytes``: memory for the forms of weights that it and the native ops it falls back to hold.
    """

    def __init__(self, kernel: NativeKernel, entry: KernelEntry, fallback: Callable[..., Tensor]) -> None:
        self.entry = entry
        self.signature = SIGNATURES[entry.op]
        self._kernel = kernel
        self._run = kernel.run
        self._fallback = fallback
        self._sets: dict[int, _Bound] = {}
        self._max_rows = entry.max_rows or _ANY
        self._dtypes = {getattr(torch, name) for name in entry.activation_dtypes if name in DTYPES}
        self._decode, self._prefill = "decode" in entry.phases, "prefill" in entry.phases
        self._label = f"headrace::{entry.op}"
        self._threads = 0
        self._counts = 0
        self._nbytes = 0
        layout = Call(self.signature)
        self._x = layout.tensor_word(self.signature.slots[0].name)
        self._out = layout.tensor_word("out") if "out" in self.signature.names() else 0
        self._residual = layout.tensor_word("residual") if "residual" in self.signature.names() else 0

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """As the op of the table."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        beneath: int = getattr(self._fallback, "nbytes", 0)
        return self._nbytes + beneath

    def covers(self, owner: object) -> bool:
        """Whether it, or a native op beneath it, was prepared for the set of weights of this record."""
        beneath = self._fallback.covers(owner) if isinstance(self._fallback, NativeOp) else False
        return id(owner) in self._sets or beneath

    def prepare(self, weights: DecoderWeights, store: WeightStore) -> None:
        """Packs all sets of a model's weights, in the order in which a step reads them.

        Raises NothingCoveredError when the kernel covers none of them, PackError when it fails on one.
        """
        sets = weight_sets(self.entry.op, weights)
        for found in sets:
            self.bind(found, store)
        if not self._sets and self.signature.names("weight"):
            raise NothingCoveredError(f"the kernel for {self.entry.op} covers none of the model's weights")

    def bind(self, found: WeightSet, store: WeightStore) -> bool:
        """Makes one set of weights known; False when the kernel does not cover it."""
        if id(found.owner) in self._sets:
            return True
        formats = {name for packed in found.linears.values() for name in packed.formats}
        if not formats <= set(self.entry.weight_formats):
            return False
        call = Call(self.signature)
        for name, number in found.ints.items():
            call.set_int(name, number)
        for name, value in found.floats.items():
            call.set_float(name, value)
        dense = {slot: store.dense(packed) for slot, packed in found.linears.items()}
        dense |= {slot: tensor.contiguous() for slot, tensor in found.tensors.items()}
        for slot, tensor in dense.items():
            call.set_tensor(slot, tensor)
        for slot, packed in found.linears.items():
            if packed.form == "blocks":
                shape = (packed.out_features, packed.in_features)
                call.set_array(slot, dense[slot].data_ptr(), "blocks", shape, (0, 0))
        held: tuple[Any, ...] = (found.owner, store, *dense.values())
        if dense and self._kernel.pack is not None:
            if not self._pack(call, store):
                return False
            for slot in dense:
                call.set_tensor(slot, None)
            held = (found.owner, store)
        else:
            self._nbytes += sum(store.keep(packed, dense[slot]) for slot, packed in found.linears.items())
        self._sets[id(found.owner)] = _Bound(call, found, held)
        return True

    def _pack(self, call: Call, store: WeightStore) -> bool:
        assert self._kernel.pack is not None and self._kernel.packed_bytes is not None
        call.set_threads(torch.get_num_threads())
        nbytes = self._kernel.packed_bytes(call.address)
        if nbytes <= 0:
            return False
        address = store.allot(nbytes)
        status = self._kernel.pack(call.address, address)
        if status != DONE:
            store.take_back(address, nbytes)
            if status == NOT_MINE:
                return False
            raise PackError(f"the kernel for {self.entry.op} failed to pack weights: hr_pack gave {status}")
        call.set_packed(address)
        self._nbytes += nbytes
        return True

    def _compute(self, bound: _Bound) -> bool:
        """Runs the call as it is written; False for HR_NOT_MINE."""
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._threads, self._counts = threads, counts_word(len(self.signature.slots), threads)
        bound.words[THREADS_WORD] = self._counts
        if _profiling():
            with record_function(self._label):
                status = self._run(bound.address)
        else:
            status = self._run(bound.address)
        if status == DONE:
            return True
        if status == NOT_MINE:
            return False
        raise EngineError(f"the kernel for {self.entry.op} failed: hr_run gave {status}")

    def _rows_op(
        self,
        owner: object,
        x: Tensor,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """(rows, in) → (rows, out), or None when it is not covered."""
        bound = self._sets.get(id(owner))
        dtype = x.dtype
        if bound is None or dtype not in self._dtypes:
            return None
        rows, width = x.shape
        if rows > self._max_rows or rows == 0 or width != bound.in_features:
            return None
        x = x if x.is_contiguous() else x.contiguous()
        if bound.out_features == width and out_dtype is None:
            out = torch.empty_like(x)
        else:
            out = torch.empty(rows, bound.out_features, dtype=out_dtype or dtype)
        words = bound.words
        if bound.rows != rows or bound.dtype is not dtype:
            bound.rows, bound.dtype = rows, dtype
            bound.call.set_tensor(self.signature.slots[0].name, x)
            bound.call.set_tensor("out", out)
            if self._residual:
                bound.call.set_tensor("residual", out)
        words[self._x] = x.data_ptr()
        words[self._out] = out.data_ptr()
        if self._residual:
            words[self._residual] = 0
            if residual is not None:
                if residual.shape != out.shape or residual.dtype is not dtype:
                    return None
                residual = residual.contiguous()
                words[self._residual] = residual.data_ptr()
        return out if self._compute(bound) else None


class _BatchOp(NativeOp):
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
        x = x if x.is_contiguous() else x.contiguous()
        if bound.out_features == width:
            out = torch.empty_like(x)
        else:
            out = torch.empty(rows, bound.out_features, dtype=dtype)
        words = bound.words
        if bound.rows != rows or bound.dtype is not dtype:
            if not (cos.is_contiguous() and sin.is_contiguous()):
                return None
            bound.rows, bound.dtype = rows, dtype
            call = bound.call
            call.set_tensor("x", x)
            call.set_tensor("out", out)
            call.set_tensor("cos", cos)
            call.set_tensor("sin", sin)
            if self._residual:
                call.set_tensor("residual", out)
        words[self._x] = x.data_ptr()
        words[self._out] = out.data_ptr()
        words[self._cos] = cos.data_ptr()
        words[self._sin] = sin.data_ptr()
        if self._residual:
            words[self._residual] = 0
            if residual is not None:
                if residual.shape != out.shape or residual.dtype is not dtype:
                    return None
                residual = residual.contiguous()
                words[self._residual] = residual.data_ptr()
        self._point_at_step(bound, kv, batch)
        return out if self._compute(bound) else None

    def _takes(self, batch: AttentionBatch, rows: int) -> bool:
        covered = self._decode if batch.num_decodes == rows else self._prefill
        return covered and rows <= self._max_rows

    def _point_at_step(self, bound: _Bound, kv: LayerKV, batch: AttentionBatch) -> None:
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


class Linear(NativeOp):
    def __call__(self, x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
        out = self._rows_op(packed, x, residual)
        return self._fallback(x, packed, residual) if out is None else out


class LogitsHead(NativeOp):
    def __call__(self, hidden: Tensor, packed: PackedLinear, softcap: float | None = None) -> Tensor:
        out = self._rows_op(packed, hidden, out_dtype=torch.float32)
        return self._fallback(hidden, packed, softcap) if out is None else out


class GatedLinear(NativeOp):
    def __call__(self, ops: Any, x: Tensor, packed: PackedLinear, activation: str) -> Tensor:
        out = self._rows_op(packed, x)
        return self._fallback(ops, x, packed, activation) if out is None else out


class MLPBlock(NativeOp):
    def __call__(self, ops: Any, x: Tensor, weights: MLPWeights, residual: Tensor | None = None) -> Tensor:
        out = self._rows_op(weights, x, residual)
        return self._fallback(ops, x, weights, residual) if out is None else out


class RMSNorm(NativeOp):
    """Heads are rows of their own to the kernel: x reaches it as (rows, size)."""

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        if x.dim() == 2:
            out = self._rows_op(norm, x)
        else:
            covered = x.numel() <= self._max_rows * x.shape[-1]
            out = self._rows_op(norm, x.reshape(-1, x.shape[-1])) if covered else None
        return self._fallback(x, norm) if out is None else out.view(x.shape)


class ActivationAndMul(NativeOp):
    def __call__(self, gate_up: Tensor, activation: str) -> Tensor:
        out = self._covered(gate_up, activation)
        return self._fallback(gate_up, activation) if out is None else out

    def _covered(self, x: Tensor, activation: str) -> Tensor | None:
        rows, width = x.shape
        if rows == 0 or rows > self._max_rows or x.dtype not in self._dtypes or not x.is_contiguous():
            return None
        bound = self._sets.get(width)
        if bound is None:
            bound = self._sets[width] = _Bound(Call(self.signature), None, ())
        out = x.new_empty(rows, width // 2)
        bound.call.set_tensor("x", x)
        bound.call.set_tensor("out", out)
        bound.call.set_int("activation", ACTIVATIONS.index(activation))
        return out if self._compute(bound) else None


class Rope(NativeOp):
    """x keeps its strides: it is turned where it lies."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, _ = x.shape
        covered = 0 < rows <= self._max_rows and x.dtype in self._dtypes and x.stride(2) == 1
        if not covered or cos.dtype is not x.dtype or not (cos.is_contiguous() and sin.is_contiguous()):
            return self._fallback(x, cos, sin)
        bound = self._sets.get(heads)
        if bound is None:
            bound = self._sets[heads] = _Bound(Call(self.signature), None, ())
        layout = (x.shape, x.stride(), cos.shape)
        if bound.rows != layout or bound.dtype is not x.dtype:
            bound.rows, bound.dtype = layout, x.dtype
            for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
                bound.call.set_tensor(name, tensor)
        for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
            bound.words[bound.call.tensor_word(name)] = tensor.data_ptr()
        return x if self._compute(bound) else self._fallback(x, cos, sin)


class Attention(_BatchOp):
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


class AttentionBlock(_BatchOp):
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


class DecoderLayer(_BatchOp):
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
        out = self._block_op(layer, x, cos, sin, kv, batch)
        return self._fallback(ops, x, layer, cos, sin, kv, batch) if out is None else out


_OPS: dict[str, type[NativeOp]] = {
    "linear": Linear,
    "gated_linear": GatedLinear,
    "mlp_block": MLPBlock,
    "rms_norm": RMSNorm,
    "rope": Rope,
    "activation_and_mul": ActivationAndMul,
    "attention": Attention,
    "attention_block": AttentionBlock,
    "decoder_layer": DecoderLayer,
    "logits_head": LogitsHead,
}


def make_op(kernel: NativeKernel, entry: KernelEntry, fallback: Callable[..., Tensor]) -> NativeOp:
    """The op that ``entry`` names, to be prepared and put into a table.

    ``fallback`` is ``OpTable.unbound(entry.op)`` of the table before: a composite's takes the table first.
    Raises PackError for an op that no kernel can provide.
    """
    if entry.op not in _OPS:
        raise PackError(
            f"no kernel can provide the op {entry.op!r}", hint=f"the ops are {', '.join(sorted(_OPS))}"
        )
    return _OPS[entry.op](kernel, entry, fallback)


def _chunk_tensors(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """chunks (num_prefills, 3) and their block tables padded with block 0, both int64."""
    chunks = [(chunk.start, chunk.end, chunk.context_len) for chunk in batch.prefills]
    width = max(chunk.block_table.shape[0] for chunk in batch.prefills)
    tables = torch.zeros(len(chunks), width, dtype=torch.int64)
    for row, chunk in zip(tables, batch.prefills, strict=True):
        row[: chunk.block_table.shape[0]] = chunk.block_table
    return torch.tensor(chunks, dtype=torch.int64), tables
