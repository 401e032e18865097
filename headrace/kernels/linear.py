"""Products with a weight, in the form that is fastest for the number of rows.

    rows     bfloat16                                      int8                       float32
    1–4      FBGEMM half pack, float32 activations         _weight_int8pack_mm        F.linear
    5–31     oneDNN, packed                                _weight_int8pack_mm        F.linear
    32–      oneDNN, packed                                dequantized, then oneDNN   F.linear

A CPU on which oneDNN has no bfloat16 (x86 without AVX-512) holds bfloat16 weights in the half pack alone, for
any number of rows, and widens what it dequantizes: torch's own bfloat16 products take ten times as long.

Blocks become numbers for every call, and so do weights that lie in parts: packs compute on those.
An output head is held in the half pack alone, at any number of rows: its logits stay float32.

With one row, reading the weights is all the work: FBGEMM's half-precision pack is read about 1.5 times as
fast as oneDNN's (docs/log.md). Its activations are float32, so a step of few rows runs in float32 from the
embedding on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.weights import PackedLinear, plain_linear

FEW_ROWS = 4
_INT8_ROWS = 32
_HALF_MAX = 65504.0
_HALF_PACK_ROWS = 16384
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
HAS_BFLOAT16 = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether oneDNN multiplies bfloat16 on this CPU: without, its operators raise."""
WIDENS = HAS_FBGEMM and not HAS_BFLOAT16
"""Whether products of bfloat16 are computed in float32 instead."""
_ONEDNN_ACTIVATIONS = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}

_pointwise = torch.ops.mkldnn._linear_pointwise.default
_binary = torch.ops.mkldnn._linear_pointwise.binary
_half_linear = torch.ops.quantized.linear_dynamic_fp16.default


def pack_onednn(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, few_rows: bool = False
) -> PackedLinear:
    """oneDNN's blocked layout alone."""
    out_features, in_features = weight.shape
    if few_rows:
        return plain_linear(weight, bias)
    up = None
    if gated and bias is None:
        half = out_features // 2
        up = _reorder(weight[half:])
        weight = weight[:half]
    return PackedLinear(
        "onednn", in_features, out_features, _reorder(weight), bias, up=up, dtype=torch.bfloat16
    )


def pack_once(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, few_rows: bool = False
) -> PackedLinear:
    """A head in FBGEMM's half-precision pack, so that its logits are float32; all else in oneDNN's layout."""
    if few_rows and _fits_half(weight):
        out_features, in_features = weight.shape
        few = _half_packs(weight, bias)
        return PackedLinear("half", in_features, out_features, bias=bias, few=few, dtype=weight.dtype)
    return pack_onednn(weight, bias, gated=gated, few_rows=few_rows)


def pack_twice(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, few_rows: bool = False
) -> PackedLinear:
    """oneDNN's layout for many rows and FBGEMM's half-precision pack for few; a head gets only the latter."""
    packed = pack_once(weight, bias, gated=gated, few_rows=few_rows)
    if packed.form != "onednn" or not _fits_half(weight):
        return packed
    return replace(packed, few=_half_packs(weight, bias))


def pack_half(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, few_rows: bool = False
) -> PackedLinear:
    """FBGEMM's half-precision pack alone, for any number of rows; as loaded what does not fit in it."""
    return pack_once(weight, bias, few_rows=True) if _fits_half(weight) else plain_linear(weight, bias)


def _fits_half(weight: Tensor) -> bool:
    low, high = torch.aminmax(weight)
    return float(high) < _HALF_MAX and float(low) > -_HALF_MAX


def _half_packs(weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """The weight's packs, rows below rows. FBGEMM packs a tall weight column by column, out of cache and
    on one thread; in slices it takes a sixth of the time, and the product none the longer."""

    def pack(start: int) -> Any:
        rows = slice(start, start + _HALF_PACK_ROWS)
        return torch.ops.quantized.linear_prepack_fp16(
            weight[rows].float(), None if bias is None else bias[rows].float()
        )

    starts = range(0, weight.shape[0], _HALF_PACK_ROWS)
    if len(starts) == 1:
        return (pack(0),)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return tuple(pool.map(pack, starts))


def pack_int8(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, few_rows: bool = False
) -> PackedLinear:
    """Weights rounded to 8 bits, one symmetric scale per output channel: off by at most scale / 2 each.

    A head is not rounded but packed in half precision, where that exists: read twice as fast as the int8
    kernel gets through its half of the bytes, and its logits are float32.
    """
    if few_rows and weight.dtype is torch.bfloat16 and HAS_FBGEMM and _fits_half(weight):
        return pack_once(weight, bias, few_rows=True)
    out_features, in_features = weight.shape
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127.0).clamp_min(1e-12).to(weight.dtype)
    rounded = (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return PackedLinear("int8", in_features, out_features, rounded, bias, scales, dtype=weight.dtype)


def linear_bfloat16(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """``linear`` on the forms of ``pack_twice`` and ``pack_onednn``."""
    few = packed.few
    if few is not None and (x.shape[0] <= FEW_ROWS or packed.weight is None):
        wide = x.dtype is torch.float32
        rows = x if wide else x.float()
        if len(few) == 1:
            y: Tensor = _half_linear(rows, few[0])
        else:
            y = torch.cat([_half_linear(rows, part) for part in few], dim=1)
        if wide:
            return y if residual is None else y.add_(residual)
        return (y if residual is None else y.add_(residual)).to(x.dtype)
    if packed.form != "onednn":
        return linear_plain(x, packed, residual)
    if x.dtype is torch.float32:  # no pack for it, or more rows than it is fast for
        y = linear_bfloat16(x.bfloat16(), packed).float()
        return y if residual is None else y.add_(residual)
    weight = packed.weight
    assert weight is not None
    if packed.up is not None:
        y = torch.cat((_plain(x, weight), _plain(x, packed.up)), dim=1)
        return y if residual is None else y.add_(residual)
    if residual is None:
        y = _pointwise(x, weight, packed.bias, "none", [], "")
    else:
        y = _binary(x, residual, weight, packed.bias, "add")
    return y


def gated_onednn(x: Tensor, packed: PackedLinear, activation: str) -> Tensor:
    """act(x @ gate.T) * (x @ up.T), the activation and the product inside the two matrix products."""
    gate = _pointwise(x, packed.weight, None, *_activation_arguments(activation))
    y: Tensor = _binary(x, gate, packed.up, None, "mul")
    return y


def linear_int8(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """``linear`` on the forms of ``pack_int8``."""
    if packed.form != "int8":
        return linear_bfloat16(x, packed, residual)
    assert packed.weight is not None and packed.scales is not None
    if x.dtype is not packed.scales.dtype:
        y = linear_int8(x.to(packed.scales.dtype), packed).to(x.dtype)
        return y if residual is None else y.add_(residual)
    # the kernel reads past the end of rows that are no multiple of 32 wide
    if x.shape[0] < _INT8_ROWS and packed.in_features % 32 == 0:
        y = torch._weight_int8pack_mm(x, packed.weight, packed.scales)
    elif WIDENS:
        y = F.linear(x.float(), packed.dense().float()).to(x.dtype)
    else:
        y = F.linear(x, packed.dense())
    if packed.bias is not None:
        y = y.add_(packed.bias)
    return y if residual is None else y.add_(residual)


def linear_plain(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """``linear`` on weights as loaded, and on blocks, which become numbers for each call: right, not fast."""
    weight = packed.weight if packed.form == "plain" else packed.dense()
    assert weight is not None
    if packed.form == "blocks":
        weight = weight.to(x.dtype)
    if weight.dtype is x.dtype and (packed.bias is None or packed.bias.dtype is x.dtype):
        y = F.linear(x, weight, packed.bias)
    else:  # a residual stream in float32 over weights in bfloat16
        y = F.linear(x.to(weight.dtype), weight).to(x.dtype)
        y = y if packed.bias is None else y.add_(packed.bias)
    return y if residual is None else y.add_(residual)


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _pointwise(x, weight, None, "none", [], "")
    return y


def _activation_arguments(activation: str) -> tuple[str, list[float], str]:
    name, algorithm = _ONEDNN_ACTIVATIONS[activation]
    return name, [], algorithm


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed
