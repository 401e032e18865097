"""What each token id stands for in decoded text: its bytes, computed once an id is first seen.

Decoders of three kinds can be had as a table: byte-level BPE, where a token is bytes in disguise;
SentencePiece with byte fallback, where ``▁`` is a space and ``<0xE2>`` one byte; and the same with the
first space dropped. Any other decoder has no table, and its texts are decoded whole (``Vocabulary.exact``
is False).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import tokenizers


class Vocabulary:
    """Bytes of token ids, for one tokenizer. ``decoder``: that part of its tokenizer.json."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, decoder: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}
        steps = _steps(decoder)
        self._byte_level = steps == ["ByteLevel"]
        self._replacements = _replacements(decoder)
        self.byte_fallback = "ByteFallback" in steps
        self.strips_first_space = _strips(decoder)
        self.byte_ids: frozenset[int] = frozenset()
        if self.byte_fallback:
            spellings = (tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
            self.byte_ids = frozenset(token_id for token_id in spellings if token_id is not None)
        known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        tabular = self._byte_level or (self._replacements is not None and set(steps) <= known)
        self.exact = tabular and self._probe()

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling; "" for an id it does not have."""
        return (self._tokenizer.id_to_token(token_id) or "") if 0 <= token_id < 1 << 32 else ""

    def has(self, token_id: int) -> bool:
        """Whether the tokenizer knows the id; models often have more rows than it has tokens."""
        return 0 <= token_id < 1 << 32 and self._tokenizer.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes the id adds to a text (part of a character, perhaps)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute(token_id)
        return found

    def whole_text(self, token_id: int) -> str | None:
        """What the id adds to a text wherever it stands; None for one that depends on its neighbours."""
        if not self.exact or token_id in self.byte_ids:
            return None
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The tokenizer's own decoding, whole."""
        ids = [token_id for token_id in token_ids if 0 <= token_id < 1 << 32]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _compute(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if self._byte_level:
            values = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if self._replacements is None:
            return self.decode([token_id], False).encode()
        if token_id in self.byte_ids:
            return bytes([int(token[3:5], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()

    def _probe(self) -> bool:
        """Whether the table agrees with the tokenizer on ids drawn from everywhere."""
        from headrace.text.detokenizer import TableDecoder

        random = Random(0)
        size = max(1, self.size)
        for _ in range(24):
            ids = [random.randrange(size) for _ in range(random.randrange(1, 9))]
            if not self.byte_ids.isdisjoint(ids):
                continue
            decoder = TableDecoder(self, skip_special_tokens=False, continuation=False)
            if decoder.push(ids) + decoder.finish() != self.decode(ids, False):
                return False
        return True


def _steps(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return ["none"]
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [str(decoder.get("type"))]


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def _replacements(decoder: Any) -> list[tuple[str, str]] | None:
    """Literal replacements inside each token; None when there is one that is no literal."""
    found = []
    for step in _flatten(decoder):
        if step["type"] == "Metaspace":
            found.append((step.get("replacement", "▁"), " "))
        elif step["type"] == "Replace":
            old = step.get("pattern", {}).get("String")
            if not isinstance(old, str):
                return None
            found.append((old, step.get("content", "")))
    return found


def _strips(decoder: Any) -> bool:
    """Whether decoding drops one space at the start of a text."""
    for step in _flatten(decoder):
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
        if step["type"] == "Strip" and step.get("content") == " " and step.get("start") == 1:
            return True
    return False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the rest as U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(v): v for v in printable} | {chr(0x100 + i): v for i, v in enumerate(others)}


_BYTE_OF = _byte_alphabet()
