"""How one kind of server takes and gives tokens: what each engine file implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.core.errors import UnsupportedFieldError
from headrace.core.messages import FinishReason, Output, TokenLogprobs
from headrace.core.request import Request, SamplingParams

NO_LOGPROB = -9999.0
"""Stands where a server knows none; what vLLM puts there, too."""


class Lookup(Exception):
    """Raised by a reader: a question to the server whose answer it needs before it can go on."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__(path)
        self.path = path
        self.body = body


class Reader(Protocol):
    """Turns the answer for one sample into outputs; ServerFault for an error in it.

    A ``DecodeError`` of msgspec means garbage. ``goes_on``: the last output was given, but the server does
    not know.
    """

    goes_on: bool

    def on_event(self, data: bytes) -> list[Output]:
        """One server-sent event. May raise Lookup: events wait until ``on_lookup``."""

    def on_lookup(self, body: bytes | None) -> list[Output]:
        """The answer to a Lookup; None when there was none."""

    def on_whole(self, body: bytes) -> list[Output]:
        """The body of an answer that does not stream."""


class TokenEngine(Protocol):
    """Writes requests for one kind of server; ``remote_model`` is what it calls the model."""

    path: str

    def encode(self, request: Request, sample_index: int, remote_model: str) -> tuple[bytes, bool]:
        """The body for one sample, and whether its answer streams; UnsupportedFieldError for what it
        cannot do."""

    def reader(self, request: Request, sample_index: int) -> Reader: ...


def limits_left(request: Request) -> tuple[int | None, int]:
    """``max_tokens`` and ``min_tokens`` for what is still to come after a rescue."""
    done = request.num_output_tokens
    sampling = request.sampling
    max_tokens = None if sampling.max_tokens is None else max(1, sampling.max_tokens - done)
    return max_tokens, max(0, sampling.min_tokens - done)


def common_sampling(request: Request) -> dict[str, Any]:
    """The parameters that vLLM and TensorRT-LLM know by our names, all of them, so that no default of the
    server's stands in for one."""
    sampling = request.sampling
    _, min_tokens = limits_left(request)
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
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.logit_bias:
        params["logit_bias"] = sampling.logit_bias
    return params


def sample_seed(request: Request, sample_index: int, bits: int) -> int:
    """A seed of its own for each sample, within what the server accepts (0 to 2**bits - 2)."""
    seed = request.sampling.seed or 0
    return int(seed + 0x9E3779B97F4A7C15 * sample_index) % ((1 << bits) - 1)


def refuse(server: str, sampling: SamplingParams, *names: str) -> None:
    """UnsupportedFieldError for the first of these fields that differs from its default."""
    defaults = SamplingParams()
    for name in names:
        if getattr(sampling, name) != getattr(defaults, name):
            raise UnsupportedFieldError(
                f"{name} is not supported by {server}, which serves this model", param=name
            )


def finish_of(reason: str | None) -> FinishReason | None:
    """Our word for a server's: whatever is no length and no abort is a stop."""
    if reason is None:
        return None
    if reason in ("length", "abort"):
        return reason  # type: ignore[return-value]
    return "stop"


def ranked(token_id: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> TokenLogprobs:
    """An entry whose rank is found in its alternatives, best first; beyond them it is a lower bound."""
    value = NO_LOGPROB if logprob is None else max(logprob, NO_LOGPROB)
    rank = next((place for place, (each, _) in enumerate(top, 1) if each == token_id), len(top) + 1)
    return TokenLogprobs(token_id, value, rank, list(top))
