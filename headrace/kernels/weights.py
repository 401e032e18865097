"""Records of one layer's weights, in the form that an op table made for itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PackedLinear:
    """A weight of (out_features, in_features) in the form that one table's ``linear`` reads.

    form      weight                                          scales
    plain     (out, in), as loaded                            None
    mkldnn    opaque oneDNN layout, same values               None
    int8      (out, in) int8, symmetric per output channel    (out,) in the activations' dtype
    """

    form: str
    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes this weight occupies, bias and scales included."""
        total = self.in_features * self.out_features * self.weight.element_size()
        for extra in (self.bias, self.scales):
            total += 0 if extra is None else extra.nbytes
        return total

    def dense(self) -> Tensor:
        """The weight as a plain (out_features, in_features) tensor; a copy unless it is plain already."""
        if self.form == "mkldnn":
            dense: Tensor = self.weight.to_dense()
            return dense
        if self.scales is not None:
            return self.weight.to(self.scales.dtype) * self.scales[:, None]
        return self.weight


@dataclass(frozen=True)
class Norm:
    """An RMS norm: weight of (size,), eps, and ``offset`` (1.0 where the model multiplies by 1 + weight)."""

    weight: Tensor
    eps: float
    offset: float = 0.0


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


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """A weight of (out, in) kept as it is."""
    out_features, in_features = weight.shape
    return PackedLinear("plain", weight, bias, None, in_features, out_features)
