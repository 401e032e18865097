"""Errors as callers see them: OpenAI's shape, one for every way a request can go wrong."""

from __future__ import annotations

import msgspec

from headrace.core.errors import (
    AuthenticationError,
    HeadraceError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)

Headers = list[tuple[bytes, bytes]]

RETRY_UNAVAILABLE_S = 2


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """``{"error": {"message", "type", "param", "code"}}``."""

    error: ErrorDetail


_encoder = msgspec.json.Encoder()


def error_body(error: HeadraceError) -> bytes:
    """JSON of an error, its hint joined to its message."""
    message = error.message if error.hint is None else f"{_sentence(error.message)} {error.hint}"
    return encode_error(message, error.kind, error.param, error.code)


def encode_error(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """JSON of an error that has no exception of ours, such as a wrong method."""
    return _encoder.encode(ErrorBody(ErrorDetail(message, kind, param, code)))


def error_headers(error: HeadraceError) -> Headers:
    """Headers that go with an error's status."""
    if isinstance(error, OverloadedError):
        return [(b"retry-after", b"%d" % error.retry_after)]
    if isinstance(error, UnavailableError):
        return [(b"retry-after", b"%d" % RETRY_UNAVAILABLE_S)]
    if isinstance(error, AuthenticationError):
        return [(b"www-authenticate", b'Bearer realm="headrace"')]
    return []


def decode_error(error: Exception, body: bytes) -> InvalidRequestError:
    """What msgspec found wrong with a body, as a 400 that names the field."""
    if isinstance(error, RecursionError):
        return InvalidRequestError("the body is nested too deeply", code="invalid_json")
    if isinstance(error, msgspec.ValidationError):
        text, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        where = f"{param}: " if param else ""
        return InvalidRequestError(f"{where}{text[:1].lower()}{text[1:]}", param=param, code="invalid_type")
    if not body.strip():
        return InvalidRequestError("the body is empty, a JSON object is needed", code="invalid_json")
    if body.startswith(b"\xef\xbb\xbf"):
        return InvalidRequestError("the body starts with a byte order mark", code="invalid_json")
    try:
        body.decode()
    except UnicodeDecodeError as broken:
        return InvalidRequestError(f"the body is not UTF-8 (byte {broken.start})", code="invalid_json")
    text = str(error)
    if "truncated" in text and b"\\u" in body and body.rstrip().endswith((b"}", b"]")):
        text = "it ends early, or a \\u escape is half of a surrogate pair"
    return InvalidRequestError(f"the body is no valid JSON: {text}", code="invalid_json")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."
