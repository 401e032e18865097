"""The same tokens as Transformers, float32, greedy: for every family, however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.harness import make_engine, make_request, reference_greedy, run, run_tokens
from tests.models.tiny import FALLBACK_FAMILIES, FAMILIES, load_reference

COUNT = 10
# sliding windows are 10 to 14 tokens: shorter and longer than the prompts; two share a prefix
_LONG = [(37 * i + 11) % 300 + 2 for i in range(24)]
PROMPTS = [[7], [3, 9, 4, 250, 8, 8], _LONG[:13], _LONG, [*_LONG[:16], 5, 6, 7]]


@pytest.mark.parametrize("family", [*FAMILIES, *FALLBACK_FAMILIES])
def test_equals_transformers(family: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(family)
    max_len = 48 if family == "llama_dynamic" else 64
    reference = load_reference(folder)
    expected = [reference_greedy(reference, prompt, COUNT) for prompt in PROMPTS]
    requests = [make_request(str(i), prompt, max_tokens=COUNT) for i, prompt in enumerate(PROMPTS)]

    chunked = make_engine(folder, max_model_len=max_len, max_num_batched_tokens=9)
    assert run_tokens(chunked, requests, stagger=2) == expected, "ragged batches and chunked prefill"
    again = run(chunked, requests)
    assert [again[r.request_id, 0].tokens for r in requests] == expected, "prefix hits"
    assert again["3", 0].num_cached_tokens == 20 and again["4", 0].num_cached_tokens == 16

    plain = make_engine(
        folder, max_model_len=max_len, max_num_batched_tokens=128, enable_prefix_caching=False, block_size=5
    )
    assert run_tokens(plain, requests) == expected, "whole prompts without prefix reuse"

    crowded = make_engine(folder, max_model_len=max_len, num_blocks=-(-max_len // 4))
    assert run_tokens(crowded, requests) == expected, "preemption"
    assert crowded.stats().num_preemptions > 0


def test_one_sequence_alone_equals_many(tiny: Callable[..., Path]) -> None:
    """More sequences than fit at once, with few blocks: each as if it were alone."""
    folder = tiny("llama")
    requests = [
        make_request(str(i), [i + 2, *_LONG[: i % 24], 3 * i % 300], max_tokens=1 + i % 26) for i in range(30)
    ]
    expected = [run_tokens(make_engine(folder), [request])[0] for request in requests[::7]]
    crowded = make_engine(folder, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=11)
    tokens = run_tokens(crowded, requests, stagger=1)
    assert tokens[::7] == expected
    assert [len(t) for t in tokens] == [1 + i % 26 for i in range(30)]
    assert crowded.stats().num_preemptions > 0
