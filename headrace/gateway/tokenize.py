"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from headrace.core.errors import InvalidRequestError, UnsupportedFieldError
from headrace.gateway.fields import detokenize_reader, tokenize_reader
from headrace.gateway.requests import note
from headrace.gateway.sse import json_value

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.prompts import Prompts
    from headrace.gateway.state import Gateway, ServedModel

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
    served = await gateway.model_of(body)
    prompts = _prompts(served)
    max_model_len = served.max_model_len
    limit = max_model_len or UNBOUNDED

    def work() -> tuple[bytes, list[str]]:
        fields, ignored = _tokenize.read(body)
        gateway.model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequestError("either prompt or messages is needed, not both", param="prompt")
        token_ids: array[int]
        if fields.prompt is None:
            token_ids = prompts.chat(fields, limit)
        else:
            special = True if fields.add_special_tokens is None else fields.add_special_tokens
            token_ids = prompts.text(fields.prompt, limit, special)
        tokens = token_ids.tolist()
        strings = (
            [prompts.tokenizer.token_text(token) for token in tokens] if fields.return_token_strs else None
        )
        return json_value(TokenizeResponse(len(tokens), max_model_len, tokens, strings)), ignored

    (answer, ignored), seconds = await gateway.texts.run(len(body), work)
    note(gateway, exchange, ignored, seconds)
    exchange.send_json(answer)


async def detokenize(gateway: Gateway, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Text of token ids, special tokens included."""
    tokenizer = _prompts(await gateway.model_of(body)).tokenizer
    vocab_size = tokenizer.vocab_size

    def work() -> tuple[bytes, list[str]]:
        fields, ignored = _detokenize.read(body)
        gateway.model(fields.model)
        largest = max(fields.tokens, default=0)
        if largest >= vocab_size:
            raise InvalidRequestError(
                f"tokens holds the id {largest}, the vocabulary has {vocab_size}", param="tokens"
            )
        text = tokenizer.decode(fields.tokens, skip_special_tokens=False)
        return json_value(DetokenizeResponse(text)), ignored

    (answer, ignored), seconds = await gateway.texts.run(len(body), work)
    note(gateway, exchange, ignored, seconds)
    exchange.send_json(answer)


def _prompts(served: ServedModel) -> Prompts:
    if served.prompts is None:
        raise UnsupportedFieldError(
            f"{served.names[0]} is served as text: there is no tokenizer for it here", param="model"
        )
    return served.prompts
