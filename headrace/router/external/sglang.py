"""SGLang: tokens in and out over ``/generate``.

Its stream repeats all ids so far (or with --incremental-streaming-output only the new ones); both end with
the newest, and ``completion_tokens`` says how many there are in all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import Output, TokenLogprobs
from headrace.core.request import Request
from headrace.router.external.completions import error_status
from headrace.router.external.engine import finish_of, limits_left, ranked, sample_seed
from headrace.router.external.faults import ServerFault, fault_of_status

LIMITS = [
    "a seed is kept only with --enable-deterministic-inference",
    "repetition_penalty at most 2",
    "a request that moves here or away in mid-stream goes on with another sampler's numbers, and presence "
    "and frequency penalties see only the output since the move",
]

_Row = list[Any]  # [log-probability or null, token id, text or null]


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: list[_Row] = []
    output_top_logprobs: list[list[_Row] | None] = []
    input_token_logprobs: list[_Row] = []
    input_top_logprobs: list[list[_Row] | None] = []


class _Answer(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


class SGLang:
    """See TokenEngine."""

    path = "/generate"

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        sampling = request.sampling
        max_tokens, min_tokens = limits_left(request)
        params: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": sampling.ignore_eos,
            "no_stop_trim": True,
            "sampling_seed": sample_seed(request, sample_index, 31),
        }
        if sampling.stop_token_ids:
            params["stop_token_ids"] = sampling.stop_token_ids
        if sampling.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        body: dict[str, Any] = {
            "rid": f"{request.request_id}-{sample_index}",
            "input_ids": request.token_ids().tolist(),
            "sampling_params": params,
            "stream": True,
        }
        wanted = [count for count in (sampling.logprobs, sampling.prompt_logprobs) if count is not None]
        if wanted:
            body["return_logprob"] = True
            body["top_logprobs_num"] = max(wanted)
            body["logprob_start_len"] = 0 if sampling.prompt_logprobs is not None else -1
        return _encoder.encode(body), True

    def reader(self, request: Request, sample_index: int) -> SGLangReader:
        return SGLangReader(request, sample_index)


class SGLangReader:
    """See Reader."""

    goes_on = False

    def __init__(self, request: Request, sample_index: int) -> None:
        self._request = request
        self._index = sample_index
        self._done = 0

    def on_event(self, data: bytes) -> list[Output]:
        if data == b"[DONE]":
            return []
        answer = _decoder.decode(data)
        if answer.error is not None:
            raise fault_of_status("SGLang", error_status(answer.error), data)
        meta = answer.meta_info
        if meta is None:
            raise msgspec.DecodeError("an event without meta_info")
        ending = meta.finish_reason or {}
        kind = ending.get("type")
        if kind == "abort":
            status = ending.get("status_code")
            if isinstance(status, int) and 400 <= status < 500:
                raise fault_of_status("SGLang", status, msgspec.json.encode(ending))
            message = f"SGLang stopped the request: {ending.get('message') or 'no reason given'}"
            raise ServerFault(UnavailableError(message), "replica_fault")
        total = meta.completion_tokens or len(answer.output_ids)
        num_new = min(total - self._done, len(answer.output_ids))
        token_ids = answer.output_ids[-num_new:] if num_new > 0 else []
        first = not self._done
        self._done = max(total, self._done)
        matched = ending.get("matched")
        stop_token = matched if kind == "stop" and isinstance(matched, int) else None
        if stop_token is not None and (not token_ids or token_ids[-1] != stop_token) and num_new <= 0:
            stop_token = None  # told, but not among the tokens
        if not token_ids and kind is None:
            return []
        return [
            Output(
                self._request.request_id,
                self._index,
                token_ids,
                finish_of(kind),
                stop_token,
                meta.cached_tokens,
                self._logprobs(meta, token_ids),
                self._prompt_logprobs(meta) if first else None,
            )
        ]

    def on_lookup(self, body: bytes | None) -> list[Output]:
        raise AssertionError("nothing is looked up")

    def on_whole(self, body: bytes) -> list[Output]:
        return self.on_event(body)

    def _logprobs(self, meta: _Meta, token_ids: list[int]) -> list[TokenLogprobs] | None:
        count = self._request.sampling.logprobs
        if count is None:
            return None
        num = len(token_ids)
        rows = meta.output_token_logprobs[-num:] if num else []
        tops = meta.output_top_logprobs[-num:] if num else []
        return [
            ranked(row[1], row[0], _top(tops[place] if place < len(tops) else None, count))
            for place, row in enumerate(rows)
        ]

    def _prompt_logprobs(self, meta: _Meta) -> list[TokenLogprobs | None] | None:
        count = self._request.sampling.prompt_logprobs
        if count is None:
            return None
        entries: list[TokenLogprobs | None] = []
        tops = meta.input_top_logprobs
        for place, row in enumerate(meta.input_token_logprobs):
            top = _top(tops[place] if place < len(tops) else None, count)
            entries.append(None if row[0] is None else ranked(row[1], row[0], top))
        return entries


def _top(rows: list[_Row] | None, count: int) -> list[tuple[int, float]]:
    return [(row[1], row[0]) for row in (rows or [])[:count]]
