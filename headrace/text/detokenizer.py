"""Ids to text, a few at a time: the pieces join to what decoding everything at once gives."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from headrace.text.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Not thread-safe: one text, one owner."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now; the rest of a character is waited for."""
        ...

    def finish(self) -> str:
        """What was still waited for, incomplete characters as U+FFFD."""
        ...

    @property
    def idle(self) -> bool:
        """Whether the next id's text depends on nothing before it: ``Tokenizer.whole_text`` is then it."""
        ...


def make_detokenizer(
    vocabulary: Vocabulary, *, skip_special_tokens: bool = True, continuation: bool = False
) -> Detokenizer:
    """``continuation``: the text goes on from a prompt, so a leading space is kept."""
    kind = TableDecoder if vocabulary.exact else WholeDecoder
    return kind(vocabulary, skip_special_tokens=skip_special_tokens, continuation=continuation)


class TableDecoder:
    """Joins each id's bytes and decodes them as UTF-8 as they become complete."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, continuation: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._strip = vocabulary.strips_first_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._fallback = _FallbackBytes() if vocabulary.byte_fallback else None

    def push(self, token_ids: Sequence[int]) -> str:
        skipped = self._skipped
        token_bytes = self._vocabulary.token_bytes
        if self._fallback is None:
            text = self._utf8.decode(b"".join([token_bytes(i) for i in token_ids if i not in skipped]))
        else:
            text = self._push_with_fallback([i for i in token_ids if i not in skipped], self._fallback)
        return self._without_first_space(text) if self._strip and text else text

    def finish(self) -> str:
        text = self._utf8.decode(b"", True) if self._fallback is None else self._fallback.end()
        return self._without_first_space(text) if self._strip and text else text

    @property
    def idle(self) -> bool:
        if self._strip:
            return False
        return not self._utf8.getstate()[0] if self._fallback is None else self._fallback.idle

    def _push_with_fallback(self, token_ids: Sequence[int], fallback: _FallbackBytes) -> str:
        vocabulary = self._vocabulary
        texts = []
        for token_id in token_ids:
            token = vocabulary.token_bytes(token_id)
            if token_id in vocabulary.byte_ids:
                texts.append(fallback.push(token))
            elif token or vocabulary.has(token_id):
                texts.append(fallback.end() + token.decode())
        return "".join(texts)

    def _without_first_space(self, text: str) -> str:
        self._strip = False
        return text[1:] if text.startswith(" ") else text


class _FallbackBytes:
    """A run of byte tokens. Once it is no UTF-8, each of its bytes is shown as U+FFFD.

    Characters that were complete before that have been shown and stay; decoding a run at once, as the
    tokenizers package does, would void them too, but would hold back whole words in some scripts.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._broken = False

    def push(self, byte: bytes) -> str:
        if self._broken:
            return _REPLACEMENT
        self._pending += byte
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._broken = True
            text = _REPLACEMENT * len(self._pending)
        self._pending = b""
        return text

    @property
    def idle(self) -> bool:
        return not self._pending and not self._broken

    def end(self) -> str:
        text = _REPLACEMENT * len(self._pending)
        self._pending = b""
        self._broken = False
        return text


class WholeDecoder:
    """Decodes everything again at each push: for decoders that look at a text as a whole."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, continuation: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        text = self._vocabulary.decode(self._ids, self._skip)
        return self._advance(text.rstrip(_REPLACEMENT))

    def finish(self) -> str:
        return self._advance(self._vocabulary.decode(self._ids, self._skip))

    @property
    def idle(self) -> bool:
        return False

    def _advance(self, text: str) -> str:
        # A decoder may rewrite what it showed (a contraction, a dropped space): wait until it grows past it.
        if not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._shown = text
        return new
