"""How fast the engine's own operators are, alone, at one depth of one model.

    python -m benchmarks.sides.operators FOLDER THREADS DEPTH NEW_TOKENS CHUNK

Prints one JSON line: the arithmetic of NEW_TOKENS after DEPTH cached tokens, and the seconds that its
operators take when each is timed by itself, in the chunks that the engine computes:

    linear      2 x T x (qkv + out + gate_up + down weights) a layer, and the head for one row
    attention   4 x heads x head_dim x keys attended to, a layer
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from headrace.bench.roofs import gemm_rate
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.kernels.weights import AttentionSpec

BLOCK_SIZE = 32
REPEATS = 3


def chunks_of(depth: int, new_tokens: int, chunk: int) -> list[tuple[int, int]]:
    """(cached tokens, new tokens) of each step."""
    return [(depth + start, min(chunk, new_tokens - start)) for start in range(0, new_tokens, chunk)]


def flops(config: dict[str, Any], depth: int, new_tokens: int) -> tuple[float, float]:
    """Linear and attention floating-point operations of ``new_tokens`` after ``depth`` cached ones."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    weights = sum(rows * columns for rows, columns in linear_shapes(config))
    linear = 2.0 * new_tokens * weights * layers + 2.0 * hidden * config["vocab_size"]
    keys = new_tokens * depth + new_tokens * (new_tokens + 1) / 2
    return linear, 4.0 * heads * head_dim * keys * layers


def linear_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(out, in) of one layer's products, fused as the engine fuses them."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]


@torch.inference_mode()
def measure(config: dict[str, Any], threads: int, depth: int, new_tokens: int, chunk: int) -> dict[str, Any]:
    """Seconds of the linear and of the attention operators, and the machine's raw GEMM rate."""
    torch.set_num_threads(threads)
    ops = OpTable.stock("cpu", torch.bfloat16)
    layers = config["num_hidden_layers"]
    steps = chunks_of(depth, new_tokens, chunk)
    linear = 0.0
    for rows, columns in linear_shapes(config):
        packed = ops.pack_linear(torch.randn(rows, columns).to(torch.bfloat16))
        for _, count in steps:
            x = torch.randn(count, columns).to(torch.bfloat16)
            linear += layers * _time(lambda x=x, packed=packed: ops.linear(x, packed), 10)
    head = ops.pack_linear(torch.randn(config["vocab_size"], config["hidden_size"]).to(torch.bfloat16))
    last = torch.randn(1, config["hidden_size"]).to(torch.bfloat16)
    linear += _time(lambda: ops.logits_head(last, head), 10)
    attention = layers * _attention_seconds(config, ops, steps)
    linear_flops, attention_flops = flops(config, depth, new_tokens)
    return {
        "linear_seconds": linear,
        "attention_seconds": attention,
        "linear_flops": linear_flops,
        "attention_flops": attention_flops,
        "gemm_bf16": gemm_rate(torch.bfloat16, threads),
    }


def _attention_seconds(config: dict[str, Any], ops: OpTable, steps: list[tuple[int, int]]) -> float:
    heads, kv_heads, head_dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    longest = max(cached + count for cached, count in steps)
    num_blocks = -(-longest // BLOCK_SIZE)
    kv = LayerKV.allocate(num_blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16)
    kv.keys.normal_()
    kv.values.normal_()
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim, head_dim**-0.5)
    table = list(range(num_blocks))
    seconds = 0.0
    for cached, count in steps:
        q = torch.randn(count, heads, head_dim).to(torch.bfloat16)
        k = torch.randn(count, kv_heads, head_dim).to(torch.bfloat16)

        def call(q: torch.Tensor = q, k: torch.Tensor = k, cached: int = cached, count: int = count) -> None:
            batch = AttentionBatch.build([BatchEntry(cached, count, table)], BLOCK_SIZE)
            ops.attention(q, k, k, kv, batch, spec)

        seconds += _time(call, REPEATS)
    return seconds


def _time(call: Any, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    print(json.dumps(measure(json.loads((Path(folder) / "config.json").read_text()), *map(int, numbers))))
