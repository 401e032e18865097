"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from headrace.core.errors import InvalidRequestError
from headrace.gateway.fields import detokenize_reader, tokenize_reader
from headrace.gateway.sse import json_value

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway

UNBOUNDED = 2**40
_tokenize = tokenize_reader()
_detokenize = detokenize_reader()


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


async def tokenize(gateway: Gateway, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Token ids of a text, or of a conversation as its template renders it."""
    limit = gateway.max_model_len or UNBOUNDED

    def work() -> tuple[bytes, list[str]]:
        fields, ignored = _tokenize.read(body)
        gateway.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequestError("either prompt or messages is needed, not both", param="prompt")
        token_ids: array[int]
        if fields.prompt is None:
            token_ids = gateway.prompts.chat(fields, limit)
        else:
            special = True if fields.add_special_tokens is None else fields.add_special_tokens
            token_ids = gateway.prompts.text(fields.prompt, limit, special)
        tokens = token_ids.tolist()
        strings = (
            [gateway.tokenizer.token_text(token) for token in tokens] if fields.return_token_strs else None
        )
        return json_value(TokenizeResponse(len(tokens), gateway.max_model_len, tokens, strings)), ignored

    (answer, ignored), seconds = await gateway.prompts.run(len(body), work)
    exchange.note(gateway.metrics, ignored, seconds)
    await exchange.send_json(answer)


async def detokenize(gateway: Gateway, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Text of token ids, special tokens included."""
    vocab_size = gateway.tokenizer.vocab_size

    def work() -> tuple[bytes, list[str]]:
        fields, ignored = _detokenize.read(body)
        gateway.check_model(fields.model)
        largest = max(fields.tokens, default=0)
        if largest >= vocab_size:
            raise InvalidRequestError(
                f"tokens holds the id {largest}, the vocabulary has {vocab_size}", param="tokens"
            )
        text = gateway.tokenizer.decode(fields.tokens, skip_special_tokens=False)
        return json_value(DetokenizeResponse(text)), ignored

    (answer, ignored), seconds = await gateway.prompts.run(len(body), work)
    exchange.note(gateway.metrics, ignored, seconds)
    await exchange.send_json(answer)
