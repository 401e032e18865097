"""Bodies of requests and their limits, as msgspec reads them; ``openapi`` describes them from here.

A field that is null means the same as one that is missing. Numbers are read loosely here (any 64-bit
integer, any finite float); ``core.request.SamplingParams`` owns their ranges.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
MAX_STOP_STRINGS = 128
ServiceTier = Literal["auto", "default", "flex", "priority"]
StopString = Annotated[str, Meta(max_length=4096)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content; only ``text`` parts can be served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints accept about how tokens are drawn, and about whose request it is."""

    model: str | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: Int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    prompt_cache_key: str | None = None


class ChatBody(Sampling, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw | UnsetType = UNSET


class CompletionBody(Sampling, frozen=True, kw_only=True):
    """POST /v1/completions; ``prompt`` is text, token ids, or a list of either."""

    prompt: Raw
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw | UnsetType = UNSET
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
