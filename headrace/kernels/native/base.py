"""What every native op shares: its sets of weights, each with a call laid out in advance, and how it is run.

An op knows the weights that it was prepared for by the identity of the record that a call comes with
(weight_sets.py). One thread may call an op at a time: in a set's call (abi.py) only pointers change, and
shapes when the number of rows does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from headrace.core.errors import EngineError, NothingCoveredError, PackError
from headrace.core.packs import KernelEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.native.abi import DONE, DTYPES, NOT_MINE, THREADS_WORD, Call, counts_word
from headrace.kernels.native.library import NativeKernel
from headrace.kernels.native.signature import SIGNATURES
from headrace.kernels.native.store import WeightStore
from headrace.kernels.native.weight_sets import WeightSet, weight_sets
from headrace.kernels.weights import DecoderWeights

_ANY = 1 << 62
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


class Bound:
    """One set of weights with its call. ``rows``, ``dtype`` or ``layout``, and ``kv`` are what the call is
    written for."""

    __slots__ = (
        "address",
        "call",
        "dtype",
        "held",
        "in_features",
        "kv",
        "layout",
        "out_features",
        "rows",
        "words",
    )

    def __init__(self, call: Call, found: WeightSet | None, held: tuple[Any, ...]) -> None:
        self.call = call
        self.words = call.words
        self.address = call.address
        self.held = held
        self.in_features = found.in_features if found else 0
        self.out_features = found.out_features if found else 0
        self.rows: Any = -1
        self.dtype: torch.dtype | None = None
        self.layout: Any = None
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
        self._sets: dict[int, Bound] = {}
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
        self._sets[id(found.owner)] = Bound(call, found, held)
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

    def _compute(self, bound: Bound) -> bool:
        """Runs the call as it is written; False for HR_NOT_MINE."""
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._threads, self._counts = threads, counts_word(len(self.signature.slots), threads)
        return self._compute_again(bound)

    def _compute_again(self, bound: Bound) -> bool:
        """``_compute`` with as many threads as the last time."""
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
        if residual is not None:
            if residual.shape != out.shape or residual.dtype is not dtype:
                return None
            residual = residual.contiguous()  # a copy lives until the call is done
        if self._residual:
            words[self._residual] = 0 if residual is None else residual.data_ptr()
        return out if self._compute(bound) else None
