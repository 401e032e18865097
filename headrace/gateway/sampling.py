"""From a body's fields to the engine's sampling parameters."""

from __future__ import annotations

import random
from typing import TypeVar

from headrace.core.errors import InvalidRequestError, UnsupportedFieldError
from headrace.core.request import SamplingParams
from headrace.gateway.schema import Sampling

Number = TypeVar("Number", int, float)


def sampling_params(
    body: Sampling, *, max_tokens: int | None, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Parameters of one request, checked; a request without a seed gets a random one."""
    stop = body.stop
    params = SamplingParams(
        n=_or(body.n, 1),
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=_or(body.top_k, 0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias or None,
        seed=new_seed() if body.seed is None else body.seed,
        stop=[] if stop is None else [stop] if isinstance(stop, str) else stop,
        stop_token_ids=body.stop_token_ids or [],
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=True if body.skip_special_tokens is None else body.skip_special_tokens,
    )
    params.validate(vocab_size)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs needs stream: false", param="prompt_logprobs")
    options = body.stream_options
    if options is not None:
        if not body.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if options.include_obfuscation:
            raise UnsupportedFieldError(
                "stream_options.include_obfuscation is not supported by this server",
                param="stream_options.include_obfuscation",
            )
    return params


def new_seed() -> int:
    """A random seed of 63 bits."""
    return random.getrandbits(63)


def include_usage(body: Sampling) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
