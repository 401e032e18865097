"""Small random decoder weights of every kind that a layer knows, and the same in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.kernels.weights import (
    AttentionSpec,
    AttentionWeights,
    DecoderWeights,
    LayerWeights,
    MLPWeights,
    Norm,
    PackedLinear,
    plain_linear,
)
from tests.kernels.ragged import BLOCK_SIZE, tables

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 48, 80, 101, 6, 2, 16
FAMILIES = ("llama", "gemma", "olmo")
DECODES = ((40, 1), (3, 1), (0, 1))
MIXED = ((40, 1), (0, 1), (21, 7), (0, 20))


def make_weights(family: str, dtype: torch.dtype, ops: OpTable | None = None) -> DecoderWeights:
    """Two layers and the ends, packed by ``ops`` (None: as they are).

    llama   the plain kind                      gemma   four norms with offset, norms on heads, window, caps
    olmo    post norms, norms over all heads, biases, sinks, values narrower than keys
    """
    generator = torch.Generator().manual_seed(FAMILIES.index(family))
    pack = ops.pack_linear if ops is not None else OpTable.reference().pack_linear

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def linear(rows: int, columns: int, *, gated: bool = False, few_rows: bool = False) -> PackedLinear:
        weight = (random(rows, columns) * columns**-0.5).to(dtype)
        bias = random(rows).to(dtype) if family == "olmo" and not few_rows else None
        return pack(weight, bias, gated=gated, few_rows=few_rows)

    def norm(size: int, there: bool = True) -> Norm | None:
        offset = 1.0 if family == "gemma" else 0.0
        weight = (random(size) * 0.3 + 1.0 - offset).to(torch.float32 if family == "gemma" else dtype)
        return Norm(weight, 1e-5, offset) if there else None

    def layer(index: int) -> LayerWeights:
        v_dim = 8 if family == "olmo" else HEAD_DIM
        spec = AttentionSpec(
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            v_dim,
            0.3,
            sliding_window=20 if family == "gemma" and index == 0 else None,
            softcap=3.0 if family == "gemma" else None,
            sinks=random(HEADS).to(dtype) if family == "olmo" else None,
        )
        full, head_norms = family == "olmo", family != "llama"
        return LayerWeights(
            attention=AttentionWeights(
                qkv=linear((HEADS + KV_HEADS) * HEAD_DIM + KV_HEADS * v_dim, HIDDEN),
                out=linear(HIDDEN, HEADS * v_dim),
                spec=spec,
                q_norm=norm(HEADS * HEAD_DIM if full else HEAD_DIM, head_norms),
                k_norm=norm(KV_HEADS * HEAD_DIM if full else HEAD_DIM, head_norms),
                qk_norm_full=full,
            ),
            mlp=MLPWeights(
                linear(2 * INNER, HIDDEN, gated=True),
                linear(HIDDEN, INNER),
                {"llama": "silu", "gemma": "gelu_tanh", "olmo": "gelu"}[family],
            ),
            input_norm=norm(HIDDEN, family != "olmo"),
            post_attention_norm=norm(HIDDEN, family != "llama"),
            pre_mlp_norm=norm(HIDDEN, family != "olmo"),
            post_mlp_norm=norm(HIDDEN, family != "llama"),
        )

    final_norm = norm(HIDDEN)
    assert final_norm is not None
    return DecoderWeights(
        [layer(0), layer(1)],
        final_norm,
        linear(VOCAB, HIDDEN, few_rows=True),
        5.0 if family == "gemma" else None,
    )


def in_float64(layer: LayerWeights) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    sinks = attention.spec.sinks
    return LayerWeights(
        attention=AttentionWeights(
            wide_linear(attention.qkv),
            wide_linear(attention.out),
            replace(attention.spec, sinks=None if sinks is None else sinks.double()),
            wide_norm(attention.q_norm),
            wide_norm(attention.k_norm),
            attention.qk_norm_full,
        ),
        mlp=MLPWeights(wide_linear(mlp.gate_up), wide_linear(mlp.down), mlp.activation),
        input_norm=wide_norm(layer.input_norm),
        post_attention_norm=wide_norm(layer.post_attention_norm),
        pre_mlp_norm=wide_norm(layer.pre_mlp_norm),
        post_mlp_norm=wide_norm(layer.post_mlp_norm),
    )


def wide_linear(packed: PackedLinear) -> PackedLinear:
    return plain_linear(packed.dense().double(), None if packed.bias is None else packed.bias.double())


def wide_norm(norm: Norm | None) -> Norm | None:
    return None if norm is None else Norm(norm.weight.double(), norm.eps, norm.offset)


@dataclass
class Step:
    """One step's inputs; ``wide`` is the same in float64 with a cache of its own."""

    batch: AttentionBatch
    kv: LayerKV
    x: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def random(
        cls, entries: tuple[tuple[int, int], ...], dtype: torch.dtype, v_head_dim: int, seed: int = 5
    ) -> Step:
        generator = torch.Generator().manual_seed(seed)
        made, num_blocks = tables(entries, consecutive=False)
        batch = AttentionBatch.build(made, BLOCK_SIZE)
        kv = LayerKV.allocate(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, v_head_dim, dtype)
        kv.keys.copy_(torch.randn(kv.keys.shape, generator=generator))
        kv.values.copy_(torch.randn(kv.values.shape, generator=generator))
        tokens, half = batch.num_tokens, 4  # half of a head turns
        angles = torch.randn(tokens, 1, half, generator=generator)
        cos, sin = angles.cos(), angles.sin()
        return cls(
            batch,
            kv,
            torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
            torch.cat((cos, cos), -1).to(dtype),
            torch.cat((-sin, sin), -1).to(dtype),
        )

    def wide(self) -> Step:
        kv = self.kv
        heads, slots, dim = kv.keys.shape
        copy = LayerKV.allocate(
            slots // BLOCK_SIZE, BLOCK_SIZE, heads, dim, kv.v_head_dim, dtype=torch.float64
        )
        copy.keys.copy_(kv.keys)
        copy.values.copy_(kv.values)
        return Step(self.batch, copy, self.x.double(), self.cos.double(), self.sin.double())


def error(out: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest expected."""
    assert out.shape == expected.shape
    return float((out.double() - expected).abs().max() / expected.abs().max())
