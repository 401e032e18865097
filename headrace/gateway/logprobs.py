"""Log-probabilities in the shapes that OpenAI's two endpoints and vLLM's extension give them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headrace.core.messages import TokenLogprobs

if TYPE_CHECKING:
    from headrace.text.stream import TokenText
    from headrace.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(entries: list[TokenText]) -> list[dict[str, Any]]:
    """``choices[].logprobs.content`` of a chat."""
    return [
        {
            "token": entry.token,
            "logprob": finite(entry.logprob),
            "bytes": list(entry.bytes),
            "top_logprobs": [
                {"token": top.token, "logprob": finite(top.logprob), "bytes": list(top.bytes)}
                for top in entry.top
            ],
        }
        for entry in entries
    ]


def completion_logprobs(entries: list[TokenText], wanted: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion; an echoed prompt's first token has none."""
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        tokens.append(entry.token)
        offsets.append(entry.text_offset)
        if entry.logprob is None:
            token_logprobs.append(None)
            top_logprobs.append(None)
            continue
        token_logprobs.append(finite(entry.logprob))
        best = {top.token: finite(top.logprob) for top in entry.top[:wanted]}
        best.setdefault(entry.token, finite(entry.logprob))
        top_logprobs.append(best)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs if wanted else None,
        "text_offset": offsets,
    }


def prompt_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprobs | None]) -> list[Any]:
    """vLLM's ``prompt_logprobs``: for each position the ids asked for, null at the first."""
    result: list[Any] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        position = {}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            position[str(token_id)] = _described(tokenizer, token_id, logprob, rank)
        position.setdefault(
            str(entry.token_id), _described(tokenizer, entry.token_id, entry.logprob, entry.rank)
        )
        result.append(position)
    return result


def finite(logprob: float | None) -> float:
    """A log-probability that JSON can say."""
    return logprob if logprob is not None and math.isfinite(logprob) else LOWEST


def _described(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
