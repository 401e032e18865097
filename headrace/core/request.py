"""What one caller asked, once text has become tokens."""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec

from headrace.core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn from the model's distribution.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``logprobs`` is the number of alternatives
    reported beside each sampled token (0: the sampled one alone, None: off); ``prompt_logprobs`` the
    same for prompt positions. ``max_tokens`` None means: up to the model's context.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequestError naming the first field that is out of range."""
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        # Logits are divided by it; the least value keeps them finite in float32.
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("n", self.n, 1, MAX_SAMPLES)
        _number("top_k", self.top_k, -1, math.inf)
        _number("min_tokens", self.min_tokens, 0, math.inf)
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, 1, math.inf)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _number(name, count, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _number("seed", self.seed, -(2**63), 2**63 - 1)
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain an empty string", param="stop")
        limit = math.inf if vocab_size is None else vocab_size - 1
        for token_id in self.stop_token_ids:
            _number("stop_token_ids", token_id, 0, limit)
        for token_id, bias in (self.logit_bias or {}).items():
            _number("logit_bias", token_id, 0, limit)
            _number("logit_bias", bias, -100.0, 100.0)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One admitted request as it travels from the gateway to an engine.

    ``prompt`` holds token ids as little-endian uint32, ``block_ids`` the concatenated 32-byte
    identities of the full blocks of the prompt (see ``core.identity``; empty: the engine computes
    them). The last ``num_output_tokens`` ids of ``prompt`` were generated before a rescue: limits,
    penalties and sampling positions count them as output. ``prefill_from`` is the connector's address of
    the replica that computes what this one lacks of the prompt (empty: it computes all itself).
    ``sampling.seed`` is always set here. ``record``: each token comes with its log-probability, and with
    what computed it, whether or not the caller asked for it.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    block_ids: bytes = b""
    num_output_tokens: int = 0
    sample_index: int = 0
    prefill_from: str = ""
    model: str = ""
    adapter: str | None = None
    tier: str = "standard"
    session: str | None = None
    deadline: float | None = None
    parent_request: str | None = None
    record: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    def token_ids(self) -> array[int]:
        """The prompt's ids as a growable uint32 array."""
        ids = array("I")
        ids.frombytes(self.prompt)
        return ids


def pack_tokens(token_ids: Any) -> bytes:
    """Token ids (any iterable of ints in [0, 2**32)) as little-endian uint32."""
    return array("I", token_ids).tobytes()


def _number(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = (low < value if low_open else low <= value) and value <= high
    if inside and math.isfinite(value):
        return
    opening = "(" if low_open else "["
    closing = ")" if math.isinf(high) else "]"
    raise InvalidRequestError(
        f"{name} must be in {opening}{low:g}, {high:g}{closing}, got {value}", param=name
    )
