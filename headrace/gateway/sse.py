"""Server-sent events with JSON inside, put together from bytes prepared once a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.errors import HeadraceError
from headrace.gateway.errors import error_body

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_value(value: Any) -> bytes:
    """Any value as JSON without a character that some clients take for the end of a line."""
    encoded = _encode(value)
    if not encoded.isascii():
        for raw, escaped in _LINE_BREAKS:
            encoded = encoded.replace(raw, escaped)
    return encoded


class EscapedTokens(dict[int, "bytes | None"]):
    """Token ids' texts as they stand inside a JSON string, computed once an id is first seen.

    None: not a text of its own (``Tokenizer.whole_text``).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes | None:
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return None
        text = self._tokenizer.whole_text(token_id, self._skip)
        escaped = self[token_id] = None if text is None else json_value(text)[1:-1]
        return escaped


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def error_event(error: HeadraceError) -> bytes:
    """The last event of a stream that failed on its way."""
    return event(error_body(error))
