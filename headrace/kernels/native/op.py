"""Native kernels as ops of the table.

What an op does not cover goes to ``fallback``, the op that the table had before:

    more rows than it was judged for, another dtype, another phase, weights it does not know, HR_NOT_MINE
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import PackError
from headrace.core.packs import KernelEntry
from headrace.kernels.native.abi import Call
from headrace.kernels.native.attending import Attention, AttentionBlock, DecoderLayer
from headrace.kernels.native.base import Bound, NativeOp
from headrace.kernels.native.library import NativeKernel
from headrace.kernels.native.signature import ACTIVATIONS
from headrace.kernels.weights import MLPWeights, Norm, PackedLinear

__all__ = ["NativeKernel", "NativeOp", "make_op"]


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
            bound = self._sets[width] = Bound(Call(self.signature), None, ())
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
            bound = self._sets[heads] = Bound(Call(self.signature), None, ())
        layout = (x.shape, x.stride(), cos.shape)
        if bound.rows != layout or bound.dtype is not x.dtype:
            bound.rows, bound.dtype = layout, x.dtype
            for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
                bound.call.set_tensor(name, tensor)
        for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
            bound.words[bound.call.tensor_word(name)] = tensor.data_ptr()
        return x if self._compute(bound) else self._fallback(x, cos, sin)


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
