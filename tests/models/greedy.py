"""Transformers' greedy decoding as the yardstick for a driver's rows."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.driver import Row
from tests.models.tiny import VOCAB

TOLERANCE = 2e-4
# lengths shorter than, equal to and longer than the windows of 10 to 14
LENGTHS = (1, 3, 12, 33)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Transformers' own cached greedy decoding: all tokens, and the logits of each position."""
    tokens, logits, cache = list(prompt), [], None
    with torch.inference_mode():
        fresh = torch.tensor([prompt])
        for _ in range(num_tokens):
            out = model(fresh, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits[0])
            tokens.append(int(out.logits[0, -1].argmax()))
            fresh = torch.tensor([tokens[-1:]])
    return tokens, torch.cat(logits)


def assert_same(rows: list[Row], references: list[tuple[list[int], torch.Tensor]]) -> None:
    for row, (tokens, logits) in zip(rows, references, strict=True):
        assert row.tokens == tokens
        torch.testing.assert_close(torch.stack(row.logits), logits, rtol=TOLERANCE, atol=TOLERANCE)
