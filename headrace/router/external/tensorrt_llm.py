"""TensorRT-LLM's ``trtllm-serve``: tokens in and out over ``/v1/completions`` with ``detokenize: false``."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.request import Request
from headrace.router.external.completions import CompletionsReader
from headrace.router.external.engine import common_sampling, limits_left, refuse, sample_seed

LIMITS = [
    "no logprobs and no prompt_logprobs: the server names tokens by their text there",
    "a request that moves here or away in mid-stream goes on with another sampler's numbers, and presence "
    "and frequency penalties see only the output since the move",
    "no cache events: its HTTP queue of them carries hashes, not tokens; what it holds is a guess",
    "an answer without max_tokens is as long as the server's own default allows",
]


_encoder = msgspec.json.Encoder()


class TensorRTLLM:
    """See TokenEngine."""

    path = "/v1/completions"

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        refuse("TensorRT-LLM", request.sampling, "logprobs", "prompt_logprobs")
        max_tokens, _ = limits_left(request)
        body: dict[str, Any] = {
            "model": remote_model,
            "prompt": request.token_ids().tolist(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "detokenize": False,
            "seed": sample_seed(request, sample_index, 63),
            **common_sampling(request),
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return _encoder.encode(body), True

    def reader(self, request: Request, sample_index: int) -> CompletionsReader:
        return CompletionsReader("TensorRT-LLM", request, sample_index)
