"""The best stock torch operators for a device, a dtype and a quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.core.errors import UsageError
from headrace.kernels import composite, linear, reference
from headrace.kernels.attention import attention
from headrace.kernels.blocks import lookup
from headrace.kernels.weights import Norm, PackedLinear

if TYPE_CHECKING:
    from headrace.kernels.table import OpTable


def select(
    device: torch.device, dtype: torch.dtype, quantization: str, decode_copies: bool
) -> dict[str, Callable[..., Any]]:
    """Implementations by op name; what is missing stays with the reference."""
    ops: dict[str, Callable[..., Any]] = {
        "linear": linear.linear_plain,
        "rms_norm": rms_norm,
        "rope": rope,
        "activation_and_mul": activation_and_mul,
        "attention": attention,
        "logits_head": logits_head_of(linear.linear_plain),
    }
    if quantization == "int8":
        ops["pack_linear"] = linear.pack_int8
        ops["linear"] = linear.linear_int8
        ops["logits_head"] = logits_head_of(linear.linear_int8)
    elif quantization != "none":
        raise UsageError(f"quantization must be none or int8, got {quantization}", param="quantization")
    elif device.type == "cpu" and dtype is torch.bfloat16 and linear.WIDENS:
        ops["pack_linear"] = linear.pack_half
        ops["linear"] = linear.linear_bfloat16
        ops["logits_head"] = logits_head_of(linear.linear_bfloat16)
        ops["embedding"] = embedding_wide
    elif device.type == "cpu" and dtype is torch.bfloat16 and linear.HAS_BFLOAT16:
        ops["pack_linear"] = linear.pack_onednn
        if linear.HAS_FBGEMM:
            ops["pack_linear"] = linear.pack_twice if decode_copies else linear.pack_once
        ops["linear"] = linear.linear_bfloat16
        ops["gated_linear"] = gated_linear
        ops["logits_head"] = logits_head_of(linear.linear_bfloat16)
        if ops["pack_linear"] is linear.pack_twice:
            ops["embedding"] = embedding_wide
    return ops


def embedding(token_ids: Tensor, weight: Tensor | PackedLinear) -> Tensor:
    if isinstance(weight, PackedLinear):
        return reference.embedding(token_ids, weight)
    return F.embedding(token_ids, weight)


def embedding_wide(token_ids: Tensor, weight: Tensor | PackedLinear) -> Tensor:
    """A step of few rows runs in float32 from here on (see ``linear``)."""
    return (
        embedding_float32(token_ids, weight)
        if token_ids.shape[0] <= linear.FEW_ROWS
        else embedding(token_ids, weight)
    )


def embedding_float32(token_ids: Tensor, weight: Tensor | PackedLinear) -> Tensor:
    """Every step runs in float32 from here on, whatever its rows: for layers whose rows' bits depend on
    nothing else in their step."""
    if isinstance(weight, PackedLinear):
        assert weight.form == "blocks" and weight.weight is not None
        return lookup(weight.weight, weight.in_features, token_ids)
    return F.embedding(token_ids, weight).float()


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x * gain / hypot(|x|, floor): four ops, half of what the decomposed F.rms_norm costs."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=norm.gain.dtype)
    y = x.div(length.hypot_(norm.floor)).mul_(norm.gain)
    return y if y.dtype is x.dtype else y.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In place: x * cos + swap_halves(x) * sin on the first cos.shape[-1] features."""
    rotated_dim = cos.shape[-1]
    head = x if rotated_dim == x.shape[-1] else x[..., :rotated_dim]
    swapped = head.roll(rotated_dim // 2, -1)
    head.mul_(cos).addcmul_(swapped, sin)
    return x


def activation_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)


def gated_linear(ops: OpTable, x: Tensor, packed: PackedLinear, activation: str) -> Tensor:
    if packed.up is not None and x.dtype is torch.bfloat16:
        return linear.gated_onednn(x, packed, activation)
    return composite.gated_linear(ops, x, packed, activation)


def logits_head_of(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``logits_head`` on top of one ``linear``."""

    def logits_head(hidden: Tensor, packed: PackedLinear, softcap: float | None = None) -> Tensor:
        # logits rounded to bfloat16 tie at the top: in float32 wherever the weight's form allows it
        if packed.form in ("half", "blocks"):
            hidden = hidden.float()
        logits = apply(hidden, packed)
        if logits.dtype is not torch.float64:
            logits = logits.float()
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    return logits_head
