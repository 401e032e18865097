"""Our decoder against Transformers' definition of every family: same logits, same greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.models.load import load_model
from tests.models.driver import Driver, Row
from tests.models.tiny import FAMILIES, VOCAB, load_reference, make_tiny

TOLERANCE = 2e-4
# lengths shorter than, equal to and longer than the windows of 10 to 14
LENGTHS = (1, 3, 12, 33)
NEW_TOKENS = 10


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


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    reference = load_reference(folder)
    loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    # dynamic scaling is defined by the length of a pass: see models/rope.py
    given = prompts((1, 3, 12, 20)) if family == "llama_dynamic" else prompts()
    expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in given]
    for chunk in (1 << 20, 1, 5, 16):
        rows = Driver(loaded.model, seed=chunk).generate(given, NEW_TOKENS, chunk=chunk)
        assert_same(rows, expected)
