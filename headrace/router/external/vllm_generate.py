"""vLLM with ``--enable-scale-out``: tokens in and out over ``/inference/v1/generate``, as 0.32 has it.

The server does not detokenize, and names log-probabilities by token id and rank.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import Output, TokenLogprobs
from headrace.core.request import Request
from headrace.router.external.completions import (
    PromptLogprob,
    Usage,
    cached_of,
    error_status,
    prompt_entries,
    stop_token_of,
)
from headrace.router.external.engine import common_sampling, finish_of, limits_left, sample_seed
from headrace.router.external.faults import ServerFault, fault_of_status


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


class _Answer(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


class VLLMGenerate:
    """See TokenEngine."""

    path = "/inference/v1/generate"

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        sampling = request.sampling
        max_tokens, _ = limits_left(request)
        params = common_sampling(request)
        params["detokenize"] = False
        if max_tokens is not None:  # left out, it is what the context has room for
            params["max_tokens"] = max_tokens
        if sampling.temperature > 0:
            params["seed"] = sample_seed(request, sample_index, 63)
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

    def reader(self, request: Request, sample_index: int) -> VLLMGenerateReader:
        return VLLMGenerateReader(request, sample_index)


class VLLMGenerateReader:
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
            raise fault_of_status("vLLM", error_status(answer.error), data)
        if answer.usage is not None and self._last is not None:
            last, self._last = self._last, None
            return [msgspec.structs.replace(last, num_cached_tokens=cached_of(answer.usage))]
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
            raise fault_of_status("vLLM", error_status(answer.error), body)
        if not answer.choices:
            raise msgspec.DecodeError("an answer without choices")
        prompt = prompt_entries(self._request, answer.prompt_logprobs)
        return [self._output(answer.choices[0], cached_of(answer.usage), prompt)]

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
            stop_token_of(reason, choice.stop_reason, token_ids),
            num_cached,
            entries,
            prompt,
        )


def _entry(each: _Logprob, count: int) -> TokenLogprobs:
    """vLLM lists the sampled token first and then the best; we list the best ``count`` alone."""
    best = sorted({top.token_id: top.logprob for top in each.top_logprobs}.items(), key=lambda top: -top[1])
    rank = each.rank or next((n for n, top in enumerate(best, 1) if top[0] == each.token_id), 0)
    return TokenLogprobs(each.token_id, each.logprob, rank, best[:count])
