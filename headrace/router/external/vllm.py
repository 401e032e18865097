"""vLLM: tokens in and out over ``/inference/v1/generate``, as version 0.32 has it.

One request a sample, so that a stop string found in one frees that one's blocks at once. Stop strings are
ours: the server does not detokenize.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import FinishReason, Output, TokenLogprobs
from headrace.core.request import Request
from headrace.router.external.engine import NO_LOGPROB, finish_of, limits_left, sample_seed
from headrace.router.external.faults import ServerFault, fault_of_status

LIMITS = [
    "a request that moves here or away in mid-stream goes on with another sampler's numbers, and presence "
    "and frequency penalties see only the output since the move",
    "cached prompt tokens are told at the end of an answer, and only with --enable-prompt-tokens-details",
    "with prompt_logprobs the answer comes as a whole",
]
TEXT_ONLY_LIMIT = "older than 0.32 or without /inference/v1/generate: text only"


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[_Logprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Answer(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


class VLLM:
    """See TokenEngine."""

    path = "/inference/v1/generate"

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        sampling = request.sampling
        max_tokens, min_tokens = limits_left(request)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": sampling.ignore_eos,
            "min_tokens": min_tokens,
            "detokenize": False,
        }
        if max_tokens is not None:  # left out, it is what the context has room for
            params["max_tokens"] = max_tokens
        if sampling.temperature > 0:
            params["seed"] = sample_seed(request, sample_index, 63)
        if sampling.stop_token_ids:
            params["stop_token_ids"] = sampling.stop_token_ids
        if sampling.logit_bias:
            params["logit_bias"] = sampling.logit_bias
        if sampling.logprobs is not None:
            params["logprobs"] = sampling.logprobs
        streams = sampling.prompt_logprobs is None
        body: dict[str, Any] = {
            "request_id": f"{request.request_id}-{sample_index}",
            "model": remote_model,
            "token_ids": request.token_ids().tolist(),
            "sampling_params": params,
            "stream": streams,
        }
        if streams:
            body["stream_options"] = {"include_usage": True}
        else:
            params["prompt_logprobs"] = sampling.prompt_logprobs
        return _encoder.encode(body), streams

    def reader(self, request: Request, sample_index: int) -> VLLMReader:
        return VLLMReader(request, sample_index)


class VLLMReader:
    """See Reader. The last output waits for the usage behind it, which tells the cached tokens."""

    goes_on = False

    def __init__(self, request: Request, sample_index: int) -> None:
        self._request = request
        self._index = sample_index
        self._last: Output | None = None

    def on_event(self, data: bytes) -> list[Output]:
        if data == b"[DONE]":
            last, self._last = self._last, None
            return [] if last is None else [last]
        answer = _decoder.decode(data)
        if answer.error is not None:
            raise fault_of_status("vLLM", _code(answer.error), data)
        if answer.usage is not None and self._last is not None:
            last, self._last = self._last, None
            return [msgspec.structs.replace(last, num_cached_tokens=_cached(answer.usage))]
        if not answer.choices:
            return []
        output = self._output(answer.choices[0], 0, None)
        if output.finish_reason is None:
            return [output]
        self._last = output
        return []

    def on_lookup(self, body: bytes | None) -> list[Output]:
        raise AssertionError("nothing is looked up")

    def on_whole(self, body: bytes) -> list[Output]:
        answer = _decoder.decode(body)
        if answer.error is not None:
            raise fault_of_status("vLLM", _code(answer.error), body)
        if not answer.choices:
            raise msgspec.DecodeError("an answer without choices")
        prompt = self._prompt_logprobs(answer.prompt_logprobs)
        return [self._output(answer.choices[0], _cached(answer.usage), prompt)]

    def _output(self, choice: _Choice, num_cached: int, prompt: list[TokenLogprobs | None] | None) -> Output:
        token_ids = choice.token_ids or []
        reason = finish_of(choice.finish_reason)
        if reason == "abort" or choice.finish_reason == "error":
            raise ServerFault(
                UnavailableError("vLLM stopped the request before it was finished"), "replica_fault"
            )
        entries = None
        if self._request.sampling.logprobs is not None:
            content = choice.logprobs.content if choice.logprobs is not None else None
            entries = [_entry(each, self._request.sampling.logprobs) for each in content or []]
        return Output(
            self._request.request_id,
            self._index,
            token_ids,
            reason,
            _stop_token(choice, reason, token_ids),
            num_cached,
            entries,
            prompt,
        )

    def _prompt_logprobs(
        self, rows: list[dict[str, _PromptLogprob] | None] | None
    ) -> list[TokenLogprobs | None] | None:
        """vLLM's dictionaries by token id as our entries; the prompt's own token need not be the best."""
        if rows is None:
            return None
        count = self._request.sampling.prompt_logprobs or 0
        entries: list[TokenLogprobs | None] = []
        for token_id, row in zip(self._request.token_ids(), rows, strict=False):
            if row is None:
                entries.append(None)
                continue
            own = row.get(str(token_id)) or _PromptLogprob(NO_LOGPROB)
            best = sorted(row.items(), key=lambda item: -item[1].logprob)[:count]
            top = [(int(each), max(value.logprob, NO_LOGPROB)) for each, value in best]
            entries.append(TokenLogprobs(token_id, max(own.logprob, NO_LOGPROB), own.rank or 0, top))
        return entries


def _entry(each: _Logprob, count: int) -> TokenLogprobs:
    """vLLM lists the sampled token first and then the best; we list the best ``count`` alone."""
    best = sorted({top.token_id: top.logprob for top in each.top_logprobs}.items(), key=lambda top: -top[1])
    rank = each.rank or next((n for n, top in enumerate(best, 1) if top[0] == each.token_id), 0)
    return TokenLogprobs(each.token_id, each.logprob, rank, best[:count])


def _stop_token(choice: _Choice, reason: FinishReason | None, token_ids: list[int]) -> int | None:
    """An id among ``stop_token_ids`` is named; without a name it was the end-of-sequence token."""
    if reason != "stop":
        return None
    if isinstance(choice.stop_reason, int):
        return choice.stop_reason
    return token_ids[-1] if token_ids and choice.stop_reason is None else None


def _cached(usage: _Usage | None) -> int:
    details = usage.prompt_tokens_details if usage is not None else None
    return details.cached_tokens or 0 if details is not None else 0


def _code(error: dict[str, Any]) -> int:
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500
