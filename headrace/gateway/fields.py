"""Which fields a body may have, and what becomes of each.

supported    read by the schema
quiet        OpenAI's, about the caller's bookkeeping: accepted, without effect
unsupported  OpenAI's (or vLLM's, where it would change the output): 400 naming it, unless its value
             means "off"
anything else is ignored, counted, and listed in a response header
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import GenericAlias
from typing import Any, Generic, TypeVar

import msgspec

from headrace.core.errors import ContextLengthError, InvalidRequestError, UnsupportedFieldError
from headrace.gateway.errors import decode_error
from headrace.gateway.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
)

BIG_BODY_BYTES = 256 * 1024
MAX_SMALL_FIELD_BYTES = 1024 * 1024
MAX_TURNS = 16_384
MAX_UNKNOWN_FIELDS = 256
MAX_TOKENS = 1_048_576
MAX_OFF_VALUE_BYTES = 64

QUIET = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"})
_BULK = frozenset({"messages", "prompt", "tokens"})

_NULL: tuple[Any, ...] = (None,)
_SHARED: Mapping[str, tuple[Any, ...]] = {
    "store": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "bad_words": (None, []),
    "allowed_token_ids": _NULL,
    "truncate_prompt_tokens": _NULL,
    "guided_json": _NULL,
    "guided_regex": _NULL,
    "guided_choice": _NULL,
    "guided_grammar": _NULL,
    "structured_outputs": _NULL,
    "logits_processors": _NULL,
}
UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_SHARED,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "audio": _NULL,
    "modalities": (None, ["text"]),
    "prediction": _NULL,
    "web_search_options": _NULL,
    "moderation": _NULL,
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "prompt_cache_options": _NULL,
    "prompt_cache_retention": (None, "in_memory"),
    "chat_template": _NULL,
    "documents": (None, []),
    "echo": (None, False),
    "best_of": (None, 1),
}
UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_SHARED,
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "prompt_embeds": _NULL,
}
UNSUPPORTED_TOKENIZE: Mapping[str, tuple[Any, ...]] = {"tools": (None, []), "chat_template": _NULL}

Body = TypeVar("Body")
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None)
_raw_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_MESSAGE_FIELDS = frozenset(ChatMessage.__struct_fields__)
_OPTION_FIELDS = frozenset(StreamOptions.__struct_fields__)


class BodyReader(Generic[Body]):
    """Reads bodies of one endpoint."""

    def __init__(self, kind: type[Body], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
        self.kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._strict: msgspec.json.Decoder[Body] = msgspec.json.Decoder(_without_others(kind))
        self._supported = frozenset(field.name for field in msgspec.structs.fields(kind))  # type: ignore[arg-type]
        self._unsupported = unsupported

    def read(self, body: bytes) -> tuple[Body, list[str]]:
        """The body and the names of its ignored fields, made printable.

        Raises InvalidRequestError naming what is wrong. Cheap checks on sizes come first, so that a
        hostile body cannot hold the interpreter for long.
        """
        if len(body) <= BIG_BODY_BYTES:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                return self._strict.decode(body), []  # most have nothing to list or to refuse
        try:
            fields = _raw_fields.decode(body)
            ignored: list[str] = []
            others = fields.keys() - self._supported
            _check_count(len(others))
            for name in others:
                if name in self._unsupported:
                    self._refuse(name, fields[name])
                elif name not in QUIET:
                    ignored.append(_printable(name))
            if len(body) > BIG_BODY_BYTES:
                self._check_sizes(body, fields)
            decoded = self._decoder.decode(body)
            return decoded, ignored + self._nested(fields)
        except (msgspec.DecodeError, RecursionError) as error:
            raise decode_error(error, body) from None

    def _nested(self, fields: Mapping[str, msgspec.Raw]) -> list[str]:
        """Ignored fields inside ``messages`` and ``stream_options`` of a body that was found valid."""
        ignored: set[str] = set()
        if "messages" in self._supported and "messages" in fields:
            for message in _raw_messages.decode(fields["messages"]) or ():
                for name in message.keys() - _MESSAGE_FIELDS:
                    ignored.add(f"messages[].{_printable(name)}")
                _check_count(len(ignored))
        if "stream_options" in self._supported and "stream_options" in fields:
            options = _raw_options.decode(fields["stream_options"]) or {}
            names = options.keys() - _OPTION_FIELDS
            _check_count(len(ignored) + len(names))
            ignored.update(f"stream_options.{_printable(name)}" for name in names)
        return list(ignored)

    def _refuse(self, name: str, raw: msgspec.Raw) -> None:
        off = self._unsupported[name]
        if len(memoryview(raw)) <= MAX_OFF_VALUE_BYTES and msgspec.json.decode(raw) in off:
            return
        raise UnsupportedFieldError(
            f"{name} is not supported by this server", hint=f"Leave {name} out.", param=name
        )

    def _check_sizes(self, body: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
        for name in fields.keys() & self._supported - _BULK:
            if len(memoryview(fields[name])) > MAX_SMALL_FIELD_BYTES:
                raise InvalidRequestError(f"{name} is longer than {MAX_SMALL_FIELD_BYTES} bytes", param=name)
        if "tokens" in self._supported and body.count(b",") > MAX_TOKENS:
            raise InvalidRequestError(f"tokens holds more than {MAX_TOKENS} ids", param="tokens")
        if body.count(b'"role"') > MAX_TURNS or body.count(b'"type"') > MAX_TURNS:
            raise InvalidRequestError(f"the body holds more than {MAX_TURNS} messages or parts")


def _without_others(kind: Any) -> Any:
    """A body's type that knows its fields and no others, also inside of it."""

    def strict(each: Any, fields: list[Any]) -> Any:
        return msgspec.defstruct(
            each.__name__, fields, bases=(each,), frozen=True, kw_only=True, forbid_unknown_fields=True
        )

    messages = GenericAlias(list, strict(ChatMessage, []))
    options = strict(StreamOptions, [])
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        if field.name == "messages":
            fields.append(("messages", messages) if field.required else ("messages", messages | None, None))
        elif field.name == "stream_options":
            fields.append(("stream_options", options | None, None))
    return strict(kind, fields)


def _check_count(count: int) -> None:
    if count > MAX_UNKNOWN_FIELDS:
        raise InvalidRequestError(f"the body has more than {MAX_UNKNOWN_FIELDS} unknown fields")


def _printable(name: str) -> str:
    return "".join(
        [char if char.isascii() and (char.isalnum() or char in "_-.") else "?" for char in name[:64]]
    )


def check_token_list(raw: msgspec.Raw, name: str, max_tokens: int) -> None:
    """Raises ContextLengthError for a raw list of more than ``max_tokens`` numbers, before decoding it."""
    view = memoryview(raw)
    if len(view) > BIG_BODY_BYTES and bytes(view[:1]) == b"[":
        count = bytes(view).count(b",") + 1
        if count > max_tokens and bytes(view[:64]).lstrip(b"[ \t\r\n")[:1].isdigit():
            raise ContextLengthError(
                f"{name} holds about {count} tokens, at most {max_tokens} can be served", param=name
            )


def header_value(names: list[str]) -> bytes:
    """Printable field names as one header value; long lists are cut."""
    shown = sorted(names)[:32]
    if len(names) > len(shown):
        shown.append(f"+{len(names) - len(shown)}")
    return ",".join(shown).encode()


def chat_reader() -> BodyReader[ChatBody]:
    return BodyReader(ChatBody, UNSUPPORTED_CHAT)


def completion_reader() -> BodyReader[CompletionBody]:
    return BodyReader(CompletionBody, UNSUPPORTED_COMPLETION)


def tokenize_reader() -> BodyReader[TokenizeBody]:
    return BodyReader(TokenizeBody, UNSUPPORTED_TOKENIZE)


def detokenize_reader() -> BodyReader[DetokenizeBody]:
    return BodyReader(DetokenizeBody, {})
