"""Records of one layer's weights, in the form that an op table made for itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.blocks import dense_blocks, read_parts


@dataclass(frozen=True)
class PackedLinear:
    """A weight of (out_features, in_features) in the form that one table's ``linear`` reads.

    form      what is held
    plain     ``weight`` (out, in), as loaded
    onednn    ``weight`` in oneDNN's blocked layout, same values; a gated pair is held as ``weight`` (gate)
              and ``up``, so that activation and product ride on the two products
    int8      ``weight`` (out, in) int8, symmetric per output channel, and ``scales`` (out,)
    half      only ``few``
    blocks    ``weight`` (bytes,) uint8: quantized blocks as GGUF files store them (blocks.py); ``formats``
              names those of its parts. ``dtype`` is that of the activations it was made for
    parts     ``parts``, each (rows, in), as they lie in a mapped file; rows below rows

    ``few``: FBGEMM's packs, rows below rows, in IEEE half precision, read when a step has few rows
    (float32 in and out). They hold bfloat16 weights exactly down to 6e-5 and to within 3e-8 below.
    """

    form: str
    in_features: int
    out_features: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    scales: Tensor | None = None
    up: Tensor | None = None
    few: tuple[Any, ...] | None = None
    parts: tuple[Tensor, ...] = ()
    dtype: torch.dtype = torch.float32

    @property
    def formats(self) -> tuple[str, ...]:
        """What a kernel that reads this weight must know to read."""
        if self.form == "blocks":
            assert self.weight is not None
            return tuple(part.format for part in read_parts(self.weight))
        return ("int8",) if self.form == "int8" else (str(self.dtype).removeprefix("torch."),)

    @property
    def nbytes(self) -> int:
        """Bytes this weight occupies in all its forms, bias and scales included."""
        size = self.in_features * self.out_features
        total = 0
        if self.weight is not None:
            total = self.weight.nbytes if self.form == "blocks" else size * self.weight.element_size()
        total += 0 if self.few is None else size * 2
        total += sum(part.nbytes for part in self.parts)
        for extra in (self.bias, self.scales):
            total += 0 if extra is None else extra.nbytes
        return total

    def shares(self, tensor: Tensor) -> bool:
        """Whether this is ``tensor``'s own memory."""
        held = self.weight if self.form in ("plain", "blocks") else None
        return held is not None and held.data_ptr() == tensor.data_ptr()

    def dense(self) -> Tensor:
        """The weight as a plain (out_features, in_features) tensor; a copy unless it is plain already.

        Blocks come out as float32, exactly what they say.
        """
        if self.form == "blocks":
            assert self.weight is not None
            return dense_blocks(self.weight, self.in_features)
        if self.form == "parts":
            return torch.cat(self.parts)
        if self.weight is None:
            assert self.few is not None
            parts = [torch.ops.quantized.linear_unpack_fp16(part)[0] for part in self.few]
            return torch.cat(parts).to(self.dtype)
        if self.scales is not None:
            return self.weight.to(self.scales.dtype) * self.scales[:, None]
        if self.up is not None:
            return torch.cat((self.weight.to_dense(), self.up.to_dense()))
        return self.weight.to_dense() if self.form == "onednn" else self.weight


@dataclass(frozen=True)
class Norm:
    """An RMS norm: ``weight`` (size,), ``eps``, ``offset`` (1.0 where the model multiplies by 1 + weight).

    Derived once: ``gain`` = (offset + weight) * sqrt(size) and ``floor`` = sqrt(size * eps), so that the
    norm of x is x * gain / hypot(|x|, floor).
    """

    weight: Tensor
    eps: float
    offset: float = 0.0
    gain: Tensor = field(init=False, repr=False)
    floor: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = self.weight.shape[-1]
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        object.__setattr__(self, "gain", (self.weight.to(wide) + self.offset) * math.sqrt(size))
        floor = torch.tensor(math.sqrt(size * self.eps), dtype=wide, device=self.weight.device)
        object.__setattr__(self, "floor", floor)


@dataclass(frozen=True)
class AttentionSpec:
    """Shape and rule of one layer's attention.

    ``sliding_window`` W: a query at position p sees keys at positions p - W + 1 … p. ``softcap`` c:
    scores become c * tanh(score / c) before the softmax. ``sinks``: (num_heads,) logits that join each
    row's softmax and carry no value (gpt-oss).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """One attention block. ``qkv`` yields (tokens, q heads | k heads | v heads) in one row.

    ``qk_norm_full``: q_norm and k_norm span all heads of a row (OLMo 2) instead of each head (Qwen 3,
    Gemma 3).
    """

    qkv: PackedLinear
    out: PackedLinear
    spec: AttentionSpec
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    qk_norm_full: bool = False


@dataclass(frozen=True)
class MLPWeights:
    """One gated MLP. ``gate_up`` yields (tokens, gate | up); ``activation``: silu, gelu or gelu_tanh."""

    gate_up: PackedLinear
    down: PackedLinear
    activation: str = "silu"


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the norms that a family does not have are None.

        x = x + post_attention_norm(attention(input_norm(x)))
        x = x + post_mlp_norm(mlp(pre_mlp_norm(x)))

    Llama, Mistral, Qwen, Phi-3: input_norm and pre_mlp_norm. Gemma 2 and 3: all four. OLMo 2: the two
    post norms.
    """

    attention: AttentionWeights
    mlp: MLPWeights
    input_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    pre_mlp_norm: Norm | None = None
    post_mlp_norm: Norm | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder that ops are called with; ``softcap`` is that of the logits."""

    layers: list[LayerWeights]
    final_norm: Norm
    head: PackedLinear
    softcap: float | None = None


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """A weight of (out, in) kept as it is."""
    out_features, in_features = weight.shape
    return PackedLinear("plain", in_features, out_features, weight, bias, dtype=weight.dtype)


def blocks_linear(
    buffer: Tensor, in_features: int, bias: Tensor | None = None, *, dtype: torch.dtype
) -> PackedLinear:
    """A weight in a buffer of quantized blocks."""
    rows = sum(part.rows for part in read_parts(buffer))
    return PackedLinear("blocks", in_features, rows, buffer, bias, dtype=dtype)


def mapped_linear(views: list[Tensor], bias: Tensor | None = None) -> PackedLinear:
    """Weights of (rows, in) as one, rows below rows, where they lie."""
    if len(views) == 1:
        return plain_linear(views[0], bias)
    rows = sum(view.shape[0] for view in views)
    return PackedLinear(
        "parts", views[0].shape[1], rows, None, bias, parts=tuple(views), dtype=views[0].dtype
    )
