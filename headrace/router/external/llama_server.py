"""llama-server of llama.cpp: tokens in and out over ``/completion``.

Its stream names only the newest token of each piece of text, and a piece ends with a whole character: the
tokens inside a character are missing, which ``tokens_predicted`` betrays. They are asked for: the server
tokenizes that piece, and its answer counts when it has the right number and the known last token. What is
missing at the very end (an answer cut inside a character) has no text and is not told at all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import EngineError
from headrace.core.messages import FinishReason, Output, TokenLogprobs
from headrace.core.request import Request
from headrace.router.external.completions import error_status
from headrace.router.external.engine import (
    NO_LOGPROB,
    Lookup,
    limits_left,
    ranked,
    refuse,
    sample_seed,
)
from headrace.router.external.faults import ServerFault, fault_of_status

LIMITS = [
    "no min_tokens, no prompt_logprobs",
    "presence and frequency penalties count the prompt's tokens too",
    "a seed has 32 bits; a request that moves here or away in mid-stream goes on with another sampler's "
    "numbers",
    "an answer cut by max_tokens inside a character ends before that character's tokens",
    "with logprobs the answer comes as a whole",
    "no cache events: what its slots hold is a guess",
]

UNBOUNDED_OUTPUT = 1 << 16
"""Tokens that penalties reach over where an answer is as long as the context allows."""


class _Probability(msgspec.Struct):
    id: int
    logprob: float | None = None
    top_logprobs: list[_Probability] = []


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _Progress(msgspec.Struct):
    cache: int = 0


class _Answer(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    prompt_progress: _Progress | None = None  # before the first token, with one that is none
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    completion_probabilities: list[_Probability] = []
    timings: _Timings | None = None
    error: dict[str, Any] | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


_decoder = msgspec.json.Decoder(_Answer)
_tokens_decoder = msgspec.json.Decoder(_Tokens)
_encoder = msgspec.json.Encoder()


class LlamaServer:
    """See TokenEngine."""

    path = "/completion"

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        sampling = request.sampling
        refuse("llama-server", sampling, "min_tokens", "prompt_logprobs")
        max_tokens, _ = limits_left(request)
        body: dict[str, Any] = {
            "prompt": request.token_ids().tolist(),
            "model": remote_model,
            "n_predict": -1 if max_tokens is None else max_tokens,
            "stream": sampling.logprobs is None,
            "return_tokens": True,
            "return_progress": sampling.logprobs is None,
            "cache_prompt": True,
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "typical_p": 1.0,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": _penalized(request, max_tokens),
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "ignore_eos": sampling.ignore_eos,
            "seed": sample_seed(request, sample_index, 32),
        }
        if sampling.logit_bias:
            body["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
        if sampling.logprobs is not None:
            # One alternative at least: with none the server leaves all of them out.
            body["n_probs"] = max(1, sampling.logprobs)
        return _encoder.encode(body), sampling.logprobs is None

    def reader(self, request: Request, sample_index: int) -> LlamaReader:
        return LlamaReader(request, sample_index)


def _penalized(request: Request, max_tokens: int | None) -> int:
    """How far back penalties look: over all there will be. The server keeps a buffer of that size."""
    sampling = request.sampling
    plain = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if plain == (1.0, 0.0, 0.0):
        return 0
    return request.num_prompt_tokens + (UNBOUNDED_OUTPUT if max_tokens is None else max_tokens)


class LlamaReader:
    """See Reader. Token ids that shall stop the answer are looked for here; the server knows none."""

    goes_on = False

    def __init__(self, request: Request, sample_index: int) -> None:
        self._request = request
        self._index = sample_index
        self._stops = frozenset(request.sampling.stop_token_ids)
        self._num_cached = 0
        self._num_tokens = 0
        self._last_token: int | None = None
        self._pending: tuple[_Answer, int] | None = None

    def on_event(self, data: bytes) -> list[Output]:
        answer = _decoder.decode(data)
        if answer.error is not None:
            raise fault_of_status("llama-server", error_status(answer.error), data)
        if answer.prompt_progress is not None:
            self._num_cached = answer.prompt_progress.cache
            return []
        if answer.stop:
            return [self._ended(answer, [])]
        num_missing = answer.tokens_predicted - self._num_tokens - len(answer.tokens)
        if num_missing > 0:
            self._pending = (answer, num_missing)
            body = {"content": answer.content, "add_special": False, "parse_special": False}
            raise Lookup("/tokenize", _encoder.encode(body))
        return self._more(answer.tokens)

    def on_lookup(self, body: bytes | None) -> list[Output]:
        assert self._pending is not None
        (answer, num_missing), self._pending = self._pending, None
        tokens = _tokens_decoder.decode(body).tokens if body is not None else []
        if len(tokens) != num_missing + len(answer.tokens) or tokens[num_missing:] != answer.tokens:
            raise ServerFault(
                EngineError(f"llama-server left out {num_missing} tokens that cannot be found again"),
                "replica_fault",
            )
        return self._more(tokens)

    def on_whole(self, body: bytes) -> list[Output]:
        answer = _decoder.decode(body)
        if answer.error is not None:
            raise fault_of_status("llama-server", error_status(answer.error), body)
        if not answer.stop:
            raise msgspec.DecodeError("an answer without an end")
        return [self._ended(answer, answer.tokens)]

    def _more(self, token_ids: list[int]) -> list[Output]:
        if not token_ids:
            return []
        token_ids, stop_token = self._cut(token_ids)
        self._num_tokens += len(token_ids)
        self._last_token = token_ids[-1]
        reason: FinishReason | None = "stop" if stop_token is not None else None
        self.goes_on = reason is not None
        return [
            Output(self._request.request_id, self._index, token_ids, reason, stop_token, self._num_cached)
        ]

    def _cut(self, token_ids: list[int]) -> tuple[list[int], int | None]:
        for place, token_id in enumerate(token_ids):
            if token_id in self._stops:
                return token_ids[: place + 1], token_id
        return token_ids, None

    def _ended(self, answer: _Answer, token_ids: list[int]) -> Output:
        token_ids, stop_token = self._cut(token_ids)
        reason: FinishReason = "stop"
        if stop_token is None:
            last = token_ids[-1] if token_ids else self._last_token
            if answer.stop_type == "eos":
                stop_token = last
            elif answer.stop_type == "limit":
                reason = "length"
        num_cached = answer.timings.cache_n if answer.timings is not None else self._num_cached
        entries = self._logprobs(answer, token_ids)
        return Output(
            self._request.request_id, self._index, token_ids, reason, stop_token, max(0, num_cached), entries
        )

    def _logprobs(self, answer: _Answer, token_ids: list[int]) -> list[TokenLogprobs] | None:
        """One entry a token; the server has none for those inside a character."""
        count = self._request.sampling.logprobs
        if count is None:
            return None
        told = iter(answer.completion_probabilities)
        row = next(told, None)
        entries = []
        for token_id in token_ids:
            if row is None or row.id != token_id:
                entries.append(TokenLogprobs(token_id, NO_LOGPROB, 0, []))
                continue
            top = [(each.id, each.logprob or 0.0) for each in row.top_logprobs]
            entry = ranked(token_id, row.logprob, top)
            entries.append(TokenLogprobs(token_id, entry.logprob, entry.rank, top[:count]))
            row = next(told, None)
        return entries
