"""vLLM: tokens in and out over ``/v1/completions``, which every server of it has (0.10.2 or later).

One request a sample, so that a stop string found in one frees that one's blocks at once. Stop strings are
ours.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.request import Request
from headrace.router.external.completions import CompletionsReader
from headrace.router.external.engine import common_sampling, limits_left, sample_seed

LIMITS = [
    "a request that moves here or away in mid-stream goes on with another sampler's numbers, and presence "
    "and frequency penalties see only the output since the move",
    "cached prompt tokens are told at the end of an answer, and only with --enable-prompt-tokens-details",
    "with prompt_logprobs the answer comes as a whole",
]
COMPLETIONS_LIMIT = (
    "without --enable-scale-out it detokenizes for nothing, and ranks beyond the top_logprobs are not known"
)

_encoder = msgspec.json.Encoder()


class VLLMCompletions:
    """See TokenEngine."""

    path = "/v1/completions"

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        sampling = request.sampling
        max_tokens, _ = limits_left(request)
        streams = sampling.prompt_logprobs is None
        body: dict[str, Any] = {
            "request_id": f"{request.request_id}-{sample_index}",
            "model": remote_model,
            "prompt": request.token_ids().tolist(),
            "stream": streams,
            "return_token_ids": True,
            "max_tokens": max_tokens,  # null: what the context has room for
            **common_sampling(request),
        }
        if sampling.temperature > 0:
            body["seed"] = sample_seed(request, sample_index, 63)
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
            body["return_tokens_as_token_ids"] = True
        if streams:
            body["stream_options"] = {"include_usage": True}
        else:
            body["prompt_logprobs"] = sampling.prompt_logprobs
        return _encoder.encode(body), streams

    def reader(self, request: Request, sample_index: int) -> CompletionsReader:
        return CompletionsReader("vLLM", request, sample_index)
