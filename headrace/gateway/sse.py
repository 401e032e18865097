"""Server-sent events with JSON inside, put together from bytes prepared once a request."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import HeadraceError
from headrace.gateway.errors import error_body

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


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def usage_event(response_id: str, kind: str, created: int, model: str, usage: dict[str, Any]) -> bytes:
    """The event without choices that ends a stream whose caller asked for its usage."""
    return event(json_value({
        "id": response_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": [],
        "usage": usage,
    }))  # fmt: skip


def error_event(error: HeadraceError) -> bytes:
    """The last event of a stream that failed on its way."""
    return event(error_body(error))
