"""Server-sent events with JSON inside, put together from bytes prepared once a request."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import HeadraceError
from headrace.gateway.errors import error_body

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_text(text: str) -> bytes:
    """A string as JSON without any character that some clients take for the end of a line."""
    encoded = _encode(text)
    if not text.isascii():
        for raw, escaped in _LINE_BREAKS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def json_value(value: Any) -> bytes:
    """Any value as JSON, likewise."""
    encoded = _encode(value)
    if not encoded.isascii():
        for raw, escaped in _LINE_BREAKS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def error_event(error: HeadraceError) -> bytes:
    """The last event of a stream that failed on its way."""
    return event(error_body(error))
