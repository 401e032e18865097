"""Tokens in and out over an OpenAI-style ``/v1/completions``: what vLLM and TensorRT-LLM have in common.

A prompt may be a list of token ids there, and a choice's new ids come as ``token_ids`` beside its text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import FinishReason, Output, TokenLogprobs
from headrace.core.request import Request
from headrace.router.external.engine import NO_LOGPROB, finish_of, ranked
from headrace.router.external.faults import ServerFault, fault_of_status

TOKEN_PREFIX = "token_id:"  # vLLM's return_tokens_as_token_ids


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)


class CompletionsReader:
    """See Reader. The last output waits for the usage behind it, which tells the cached tokens."""

    goes_on = False

    def __init__(self, server: str, request: Request, sample_index: int) -> None:
        self._server = server
        self._request = request
        self._index = sample_index
        self._last: Output | None = None

    def on_event(self, data: bytes) -> list[Output]:
        if data == b"[DONE]":
            last, self._last = self._last, None
            return [] if last is None else [last]
        answer = self._decode(data)
        if answer.usage is not None and self._last is not None and not answer.choices:
            last, self._last = self._last, None
            return [msgspec.structs.replace(last, num_cached_tokens=cached_of(answer.usage))]
        if not answer.choices:
            return []
        output = self._output(answer.choices[0], 0)
        if output.finish_reason is not None:
            self._last = output
            return []
        return [output] if output.token_ids else []

    def on_lookup(self, body: bytes | None) -> list[Output]:
        raise AssertionError("nothing is looked up")

    def on_whole(self, body: bytes) -> list[Output]:
        answer = self._decode(body)
        if not answer.choices or answer.choices[0].finish_reason is None:
            raise msgspec.DecodeError("an answer without an end")
        return [self._output(answer.choices[0], cached_of(answer.usage))]

    def _decode(self, data: bytes) -> _Answer:
        answer = _decoder.decode(data)
        if answer.error is not None:
            raise fault_of_status(self._server, error_status(answer.error), data)
        return answer

    def _output(self, choice: _Choice, num_cached: int) -> Output:
        if choice.token_ids is None and choice.text:
            raise msgspec.DecodeError("text where token ids were asked for")
        token_ids = choice.token_ids or []
        reason = finish_of(choice.finish_reason)
        if reason == "abort" or choice.finish_reason == "error":
            message = f"{self._server} stopped the request before it was finished"
            raise ServerFault(UnavailableError(message), "replica_fault")
        return Output(
            self._request.request_id,
            self._index,
            token_ids,
            reason,
            stop_token_of(reason, choice.stop_reason, token_ids),
            num_cached,
            self._logprobs(choice.logprobs, token_ids),
            prompt_entries(self._request, choice.prompt_logprobs),
        )

    def _logprobs(self, told: _Logprobs | None, token_ids: list[int]) -> list[TokenLogprobs] | None:
        count = self._request.sampling.logprobs
        if count is None:
            return None
        entries = []
        for place, token_id in enumerate(token_ids):
            value = None
            best: list[tuple[int, float]] = []
            if told is not None and place < len(told.token_logprobs):
                value = told.token_logprobs[place]
                row = told.top_logprobs[place] if place < len(told.top_logprobs) else None
                best = sorted(_by_id(row or {}), key=lambda item: -item[1])
            entry = ranked(token_id, value, best)
            entries.append(msgspec.structs.replace(entry, top=best[:count]))
        return entries


def prompt_entries(
    request: Request, rows: list[dict[str, PromptLogprob] | None] | None
) -> list[TokenLogprobs | None] | None:
    """vLLM's dictionaries by token id as our entries; the prompt's own token need not be among the best."""
    if rows is None:
        return None
    count = request.sampling.prompt_logprobs or 0
    entries: list[TokenLogprobs | None] = []
    for token_id, row in zip(request.token_ids(), rows, strict=False):
        if row is None:
            entries.append(None)
            continue
        own = row.get(str(token_id)) or PromptLogprob(NO_LOGPROB)
        best = sorted(row.items(), key=lambda item: -item[1].logprob)[:count]
        top = [(int(each), max(value.logprob, NO_LOGPROB)) for each, value in best]
        entries.append(TokenLogprobs(token_id, max(own.logprob, NO_LOGPROB), own.rank or 0, top))
    return entries


def stop_token_of(
    reason: FinishReason | None, stop_reason: int | str | None, token_ids: list[int]
) -> int | None:
    """An id among ``stop_token_ids`` is named; without a name it was the end-of-sequence token."""
    if reason != "stop":
        return None
    if isinstance(stop_reason, int):
        return stop_reason
    return token_ids[-1] if token_ids and stop_reason is None else None


def cached_of(usage: Usage | None) -> int:
    """The prompt tokens that were found in the cache, where the server tells."""
    details = usage.prompt_tokens_details if usage is not None else None
    return details.cached_tokens or 0 if details is not None else 0


def error_status(error: Any) -> int:
    """The status that an error inside an answer of status 200 speaks of."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _by_id(row: dict[str, float]) -> list[tuple[int, float]]:
    return [
        (int(name.removeprefix(TOKEN_PREFIX)), value)
        for name, value in row.items()
        if name.startswith(TOKEN_PREFIX)
    ]
