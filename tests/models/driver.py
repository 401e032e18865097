"""Runs a model as an engine would, without one: ragged batches, chunks, scattered blocks.

Every sequence gets its blocks from a shuffled pool, so block tables are never in order, and all caches
start out full of large values: a read of a slot that was not written shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.models.causal_lm import CausalLM


@dataclass
class Row:
    """One sequence: its tokens, how many are computed, its blocks and the logits of each position."""

    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Driver:
    """Greedy decoding of several prompts at once on ``model``."""

    def __init__(
        self,
        model: CausalLM,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.kv = [
            LayerKV.allocate(num_blocks, block_size, *spec, dtype=dtype) for spec in model.config.kv_specs
        ]
        for cache in self.kv:
            cache.keys.fill_(1e3)
            cache.values.fill_(1e3)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def generate(self, prompts: list[list[int]], num_tokens: int, *, chunk: int = 1 << 20) -> list[Row]:
        """Computes every prompt in chunks of up to ``chunk`` tokens, then ``num_tokens`` more each.

        Sequences advance together; a step mixes chunks and single tokens as it comes.
        """
        rows = [Row(list(prompt), len(prompt)) for prompt in prompts]
        while pending := [row for row in rows if len(row.tokens) < row.num_prompt_tokens + num_tokens]:
            self.step([(row, min(chunk, len(row.tokens) - row.num_computed)) for row in pending])
            for row in pending:
                if row.num_computed == len(row.tokens):
                    row.tokens.append(int(row.logits[-1].argmax()))
        return rows

    def step(self, parts: list[tuple[Row, int]]) -> None:
        """Computes the next ``count`` tokens of each row in one forward pass; keeps all their logits."""
        parts = sorted(parts, key=lambda part: part[1] != 1)
        entries, token_ids = [], []
        for row, count in parts:
            end = row.num_computed + count
            while len(row.block_table) * self.block_size < end:
                row.block_table.append(self.free.pop())
            entries.append(BatchEntry(row.num_computed, count, row.block_table))
            token_ids += row.tokens[row.num_computed : end]
            row.num_computed = end
        with torch.inference_mode():
            batch = AttentionBatch.build(entries, self.block_size)
            hidden = self.model.forward(torch.tensor(token_ids), batch, self.kv)
            logits = self.model.logits(hidden)
        assert logits.dtype == torch.float32
        start = 0
        for row, count in parts:
            row.logits += logits[start : start + count].unbind()
            start += count
