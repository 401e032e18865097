"""Ops that compute each row as if it were alone, summed in float64: the same bits whatever is beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.weights import AttentionSpec, Norm, PackedLinear


def embedding(token_ids: Tensor, weight: Any) -> Tensor:
    return reference.embedding(token_ids, weight).float()


def linear(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    weight = packed.dense().double().T
    rows = [row.double() @ weight for row in x]
    out = torch.stack(rows).float()
    if packed.bias is not None:
        out = out + packed.bias
    return out if residual is None else out + residual


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    return torch.stack([reference.rms_norm(row.double(), norm) for row in x]).float()


def activation_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    return torch.stack([reference.activation_and_mul(row.double(), activation) for row in gate_up]).float()


def logits_head(hidden: Tensor, packed: PackedLinear, softcap: float | None = None) -> Tensor:
    logits = linear(hidden, packed).double()
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)).float()


def attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: AttentionBatch, spec: AttentionSpec
) -> Tensor:
    kv.keys[:, batch.slot_mapping] = k.transpose(0, 1).to(kv.keys.dtype)
    kv.values[:, batch.slot_mapping] = v.transpose(0, 1).to(kv.values.dtype)
    rows = [(batch.decode_block_tables[i], length) for i, length in enumerate(batch.decode_lens_list)]
    for chunk in batch.prefills:
        rows += [(chunk.block_table, chunk.context_len + i + 1) for i in range(chunk.end - chunk.start)]
    outs = [
        reference._attend(q[i : i + 1].double(), kv, table, length, spec)
        for i, (table, length) in enumerate(rows)
    ]
    return torch.cat(outs).flatten(1).float()


OPS: dict[str, Any] = {
    "embedding": embedding,
    "linear": linear,
    "rms_norm": rms_norm,
    "activation_and_mul": activation_and_mul,
    "logits_head": logits_head,
    "attention": attention,
}
