"""bfloat16: batching, chunking and reuse may change a token only where two were as good as equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core.messages import TokenLogprobs
from tests.engine.harness import Result, make_engine, make_request, run

COUNT = 20
PROMPTS = [[(31 * i + 7 * j) % 300 + 2 for j in range(3 + 2 * i)] for i in range(16)]


def noise_floor(folder: Path) -> float:
    """The largest change of a log-probability when the same positions are computed in one piece, in
    chunks of 3, or beside other sequences; over texts that the test itself does not use."""
    texts = [[(17 * i + 13 * j) % 300 + 2 for j in range(40)] for i in range(8)]
    requests = [
        make_request(str(i), text, max_tokens=1, prompt_logprobs=20, logprobs=20)
        for i, text in enumerate(texts)
    ]
    whole = {}
    for request in requests:
        whole |= run(make_engine(folder, dtype="bfloat16", max_num_batched_tokens=64), [request])
    chunked = run(make_engine(folder, dtype="bfloat16", max_num_batched_tokens=3), requests)
    together = run(make_engine(folder, dtype="bfloat16", max_num_batched_tokens=64), requests)
    changes = [
        abs(left[token] - right[token])
        for other in (chunked, together)
        for key, result in whole.items()
        for left, right in zip(_known(result), _known(other[key]), strict=True)
        for token in left.keys() & right.keys()
    ]
    assert len(changes) > 8 * 39 * 20
    return max(changes)


def _known(result: Result) -> list[dict[int, float]]:
    entries: list[TokenLogprobs | None] = [*(result.prompt_logprobs or [])[1:], *result.logprobs]
    return [{entry.token_id: entry.logprob, **dict(entry.top)} for entry in entries if entry is not None]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_first_divergence_lies_within_the_noise_floor(family: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(family)
    floor = noise_floor(folder)
    assert floor < 0.5, "far more than rounding to 8 bits explains"
    requests = [
        make_request(str(i), prompt, max_tokens=COUNT, logprobs=2) for i, prompt in enumerate(PROMPTS)
    ]
    alone = {}
    for request in requests:
        alone |= run(make_engine(folder, dtype="bfloat16", max_num_batched_tokens=64), [request])
    crowded = make_engine(folder, dtype="bfloat16", num_blocks=30, max_num_batched_tokens=7)
    num_equal = 0
    for engine in (make_engine(folder, dtype="bfloat16", max_num_batched_tokens=64), crowded, crowded):
        for key, result in run(engine, requests, stagger=1).items():
            pairs = list(zip(alone[key].tokens, result.tokens, strict=True))
            first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
            if first is None:
                num_equal += 1
                continue
            (_, best), (_, second) = alone[key].logprobs[first].top
            assert best - second <= 2 * floor, (
                f"{key} diverges at {first}, gap {best - second}, floor {floor}"
            )
    assert num_equal > len(requests), "most of the 48 streams are equal to the end"
