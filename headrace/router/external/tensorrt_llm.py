"""TensorRT-LLM's ``trtllm-serve``: tokens in and out over ``/v1/completions`` with ``detokenize: false``."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.router.external.engine import finish_of, limits_left, refuse, sample_seed
from headrace.router.external.faults import ServerFault, fault_of_status

LIMITS = [
    "no logprobs and no prompt_logprobs: the server names tokens by their text there",
    "a request that moves here or away in mid-stream goes on with another sampler's numbers, and presence "
    "and frequency penalties see only the output since the move",
    "no cache events: its HTTP queue of them carries hashes, not tokens; what it holds is a guess",
    "an answer without max_tokens is as long as the server's own default allows",
]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


class TensorRTLLM:
    """See TokenEngine."""

    path = "/v1/completions"

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        sampling = request.sampling
        refuse("TensorRT-LLM", sampling, "logprobs", "prompt_logprobs")
        max_tokens, min_tokens = limits_left(request)
        body: dict[str, Any] = {
            "model": remote_model,
            "prompt": request.token_ids().tolist(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "detokenize": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": sampling.ignore_eos,
            "min_tokens": min_tokens,
            "seed": sample_seed(request, sample_index, 63),
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if sampling.stop_token_ids:
            body["stop_token_ids"] = sampling.stop_token_ids
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        return _encoder.encode(body), True

    def reader(self, request: Request, sample_index: int) -> TensorRTLLMReader:
        return TensorRTLLMReader(request, sample_index)


class TensorRTLLMReader:
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
            raise fault_of_status("TensorRT-LLM", 500, data)
        if answer.usage is not None and self._last is not None and not answer.choices:
            last, self._last = self._last, None
            details = answer.usage.prompt_tokens_details
            cached = details.cached_tokens or 0 if details is not None else 0
            return [msgspec.structs.replace(last, num_cached_tokens=cached)]
        if not answer.choices:
            return []
        choice = answer.choices[0]
        if choice.token_ids is None and choice.text:
            raise msgspec.DecodeError("text where token ids were asked for")
        token_ids = choice.token_ids or []
        reason = finish_of(choice.finish_reason)
        if reason == "abort":
            raise ServerFault(UnavailableError("TensorRT-LLM stopped the request"), "replica_fault")
        stop_token = choice.stop_reason if isinstance(choice.stop_reason, int) else None
        if reason is None and not token_ids:
            return []
        output = Output(self._request.request_id, self._index, token_ids, reason, stop_token)
        if reason is None:
            return [output]
        self._last = output
        return []

    def on_lookup(self, body: bytes | None) -> list[Output]:
        raise AssertionError("nothing is looked up")

    def on_whole(self, body: bytes) -> list[Output]:
        raise AssertionError("every answer streams")
