"""The tokenizer cache: a conversation's next turn encodes only what is new, with the ids of a full encoding.

    rendered text   <|im_start|> user\\nHello <|im_end|> \\n <|im_start|> assistant\\n
    boundaries      ────────────              ──────────    ────────────
    segments                     user\\nHello             \\n              assistant\\n

Tokenizers cut added tokens out of the text before anything else sees it, and then treat what lies between
them piece by piece. So ids of the pieces, each kept in an LRU under its text, join to the ids of the whole.
Where that does not hold (an added token that overlaps a boundary, whitespace-eating tokens beside added
whitespace, a pre-tokenizer that asks where in the text a piece lies) the construction below either accounts
for it or gives up boundaries, and probes compare both ways before the cache is used.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from sys import getsizeof
from threading import Lock
from typing import Any

import msgspec
import tokenizers

from headrace.core.errors import InvalidRequestError
from headrace.text.patterns import WHITESPACE, literal_pattern

_ENTRY_OVERHEAD = 200
Key = tuple[bool, bool, str]
"""(literal, inner, text): special tokens disabled; not at the start of the text; the piece itself."""


class SegmentCache:
    """Encodes texts piece by piece through a bounded LRU. Thread-safe.

    ``capacity`` bounds texts plus ids in bytes. ``tokenizer`` must have neither padding nor truncation.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, pre_tokenizer: Any, *, capacity: int) -> None:
        self._tokenizer = tokenizer
        self._added = list(tokenizer.get_added_tokens_decoder().items())
        self._token_bytes = {token.content: _pack([token_id]) for token_id, token in self._added}
        self._left = {token.content for _, token in self._added if token.lstrip}
        self._right = {token.content for _, token in self._added if token.rstrip}
        self.specials = [token.content for _, token in self._added if token.special and token.content]
        # Through the normalizer, a special token can appear out of text that does not spell it.
        self.guards_always = tokenizer.normalizer is not None and any(
            token.special and token.normalized for _, token in self._added
        )
        self._inner_pre_tokenizer = _without_first(pre_tokenizer)
        self._encoders: dict[tuple[bool, bool], tokenizers.Tokenizer] = {(False, False): tokenizer}
        self._encoders_lock = Lock()
        self._capacity = capacity
        self._entries: OrderedDict[Key, bytes] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        cuts = _safe_boundaries([token for _, token in self._added])
        self.special_pattern = literal_pattern(self.specials)
        same = set(cuts) == set(self.specials)
        self._boundaries = self.special_pattern if same else literal_pattern(cuts)
        if self._boundaries is not None and not self._probe():
            self._boundaries = None
        self.clear()

    @property
    def splits(self) -> bool:
        """Whether texts are cut at special tokens; if not, only whole texts are cached."""
        return self._boundaries is not None

    def encode(self, text: str, guard: str | None = None) -> array[int]:
        """Ids of ``text``, special tokens parsed, none added.

        With ``guard``, that character was put into special-token text that must stay text: it is taken
        out again, and what it was in is encoded with special tokens disabled. Raises InvalidRequestError
        for text with lone surrogates.
        """
        joined: array[int] = array("I")
        joined.frombytes(b"".join(self._lookup(list(self._split(text, guard)))))
        return joined

    def encode_full(self, text: str, guard: str | None = None) -> array[int]:
        """What ``encode`` must equal, computed without the cache."""
        if guard is None:
            return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids: array[int] = array("I")
        for part in self._split(text, guard):
            if isinstance(part, bytes):
                ids.frombytes(part)
            else:
                _, inner, piece = part
                ids.extend(self._encoder(True, inner).encode(piece, add_special_tokens=False).ids)
        return ids

    def clear(self) -> None:
        """Forgets every entry and count."""
        with self._lock:
            self._entries.clear()
            self.nbytes = self.hits = self.misses = 0

    def _split(self, text: str, guard: str | None) -> Iterator[bytes | Key]:
        """Packed ids of boundary tokens and keys of the pieces between them, in order."""
        pattern = self._boundaries if guard is None else self.special_pattern
        parts = pattern.split(text) if pattern is not None and text else [text]
        inner_differs = self._inner_pre_tokenizer is not None
        left, right = self._left, self._right
        last = len(parts) - 1
        for index, part in enumerate(parts):
            if index % 2:
                yield self._token_bytes[part]
                continue
            if right and index > 0 and parts[index - 1] in right:
                part = part.lstrip(WHITESPACE)
            if left and index < last and parts[index + 1] in left:
                part = part.rstrip(WHITESPACE)
            if not part:
                continue
            literal = guard is not None and (guard in part or self.guards_always)
            if literal:
                part = part.replace(guard or "", "")
            yield (literal, inner_differs and index > 0, part)

    def _lookup(self, parts: list[bytes | Key]) -> list[bytes]:
        entries = self._entries
        found: list[bytes] = []
        wanted: dict[Key, list[int]] = {}
        with self._lock:
            for part in parts:
                if isinstance(part, bytes):
                    found.append(part)
                    continue
                ids = entries.get(part)
                if ids is None:
                    wanted.setdefault(part, []).append(len(found))
                    found.append(b"")
                else:
                    entries.move_to_end(part)
                    found.append(ids)
                    self.hits += 1
            self.misses += len(wanted)
        if wanted:
            computed = self._compute(list(wanted))
            for key, ids in computed.items():
                for position in wanted[key]:
                    found[position] = ids
            self._insert(computed)
        return found

    def _compute(self, keys: list[Key]) -> dict[Key, bytes]:
        batches: dict[tuple[bool, bool], list[Key]] = {}
        for key in keys:
            batches.setdefault(key[:2], []).append(key)
        computed = {}
        for (literal, inner), batch in batches.items():
            encoder = self._encoder(literal, inner)
            try:
                # encode_batch_fast lets other threads run; encode does not.
                encodings = encoder.encode_batch_fast([key[2] for key in batch], add_special_tokens=False)
            except (UnicodeError, TypeError) as error:
                raise invalid_text() from error
            for key, encoding in zip(batch, encodings, strict=True):
                computed[key] = _pack(encoding.ids)
        return computed

    def _insert(self, computed: dict[Key, bytes]) -> None:
        with self._lock:
            for key, ids in computed.items():
                cost = _cost(key, ids)
                if cost * 2 > self._capacity:
                    continue
                if self._entries.setdefault(key, ids) is ids:
                    self.nbytes += cost
            while self.nbytes > self._capacity:
                key, ids = self._entries.popitem(last=False)
                self.nbytes -= _cost(key, ids)

    def _encoder(self, literal: bool, inner: bool) -> tokenizers.Tokenizer:
        encoder = self._encoders.get((literal, inner))
        if encoder is None:
            with self._encoders_lock:
                encoder = _variant(self._tokenizer, self._inner_pre_tokenizer if inner else None)
                encoder.encode_special_tokens = literal
                self._encoders[literal, inner] = encoder
        return encoder

    def _probe(self) -> bool:
        """Whether cutting at boundaries reproduced the full ids on texts made to find a difference."""
        boundaries = self._boundaries
        if boundaries is None:
            return True
        # One token of each kind of behaviour, plus the first few; then neighbours that could interact.
        kinds: dict[tuple[bool, ...], str] = {}
        for _, added in self._added:
            if added.content and boundaries.fullmatch(added.content):
                kinds.setdefault((added.special, added.lstrip, added.rstrip), added.content)
        tokens = [*kinds.values(), *self.specials[:4]]
        others = [added.content for _, added in self._added if not added.special][:4]
        probes = []
        for token in tokens:
            for other in ("a", " a ", "\n", "  \n\n ", "\t", "é▁x", "字", "1", *tokens[:2], *others):
                probes += [other + token + other, token + other, other + token, f"w {token}{other} {token}z"]
        return all(self.encode(probe) == self.encode_full(probe) for probe in dict.fromkeys(probes))


def invalid_text() -> InvalidRequestError:
    """The error for a string that is not valid Unicode."""
    return InvalidRequestError(
        "the text is not valid Unicode: it holds a surrogate without its other half",
        hint="escape characters above U+FFFF as a pair, or send them as UTF-8",
        code="invalid_unicode",
    )


def _pack(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def _cost(key: Key, ids: bytes) -> int:
    return getsizeof(key[2]) + len(ids) + _ENTRY_OVERHEAD


def _safe_boundaries(added: list[Any]) -> list[str]:
    """Added tokens at which text may be cut: every special one, and those that could swallow part of it.

    Empty when cutting could change the result: normalized tokens are looked for in another text than
    ours, a token that must stand as a single word looks across the cut, and a token that eats the
    whitespace beside it competes with added tokens made of whitespace.
    """
    raw = [token for token in added if not token.normalized and token.content]
    chosen = {token.content for token in raw if token.special and not token.single_word}
    if not chosen:
        return []
    eats = any(token.lstrip or token.rstrip for token in raw)
    edges = {edge for token in raw for edge in (token.content[0], token.content[-1])}
    if eats and any(edge in WHITESPACE or edge.isspace() for edge in edges):
        return []
    others = {token.content for token in raw} - chosen
    while swallowing := _swallowing(others, chosen):
        chosen |= swallowing
        others -= swallowing
    for token in raw:
        if token.single_word and (
            token.content in chosen
            or any(re.match(r"\w", edge) for text in chosen for edge in (text[0], text[-1]))
        ):
            return []
    return sorted(chosen)


def _swallowing(others: set[str], chosen: set[str]) -> set[str]:
    """Those of ``others`` that can match in place of one of ``chosen``, beginning earlier or ending later."""
    beginnings = {text[:end] for text in chosen for end in range(1, len(text) + 1)}
    longest = max(map(len, chosen))
    return {
        other
        for other in others
        for start in range(len(other))
        if (start and other[start:] in beginnings)
        or any(other[start:end] in chosen for end in range(start + 1, min(len(other), start + longest) + 1))
    }


def _without_first(node: Any) -> Any:
    """The pre-tokenizer for a piece that is not at the start of the text; None when it is the same one.

    Only Metaspace with ``prepend_scheme`` "first" asks where a piece lies.
    """
    if isinstance(node, dict):
        changed = {}
        for name, value in node.items():
            if (inner := _without_first(value)) is not None:
                changed[name] = inner
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
            changed["prepend_scheme"] = "never"
        return {**node, **changed} if changed else None
    if isinstance(node, list):
        inners = [_without_first(value) for value in node]
        if any(inner is not None for inner in inners):
            return [value if inner is None else inner for value, inner in zip(node, inners, strict=True)]
    return None


def _variant(tokenizer: tokenizers.Tokenizer, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    """A tokenizer that shares ``tokenizer``'s model and has settings of its own."""
    variant = tokenizers.Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        variant.normalizer = tokenizer.normalizer
    if pre_tokenizer is not None:
        shell = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": pre_tokenizer,
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        }
        shell_tokenizer = tokenizers.Tokenizer.from_str(msgspec.json.encode(shell).decode())
        variant.pre_tokenizer = shell_tokenizer.pre_tokenizer
    elif tokenizer.pre_tokenizer is not None:
        variant.pre_tokenizer = tokenizer.pre_tokenizer
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    variant.add_tokens([token for _, token in added])  # all at once: each call rebuilds the search
    if _ids_of(variant) != _ids_of(tokenizer):
        # Ids with gaps cannot be added one after the other: take the long way.
        whole = msgspec.json.decode(tokenizer.to_str())
        if pre_tokenizer is not None:
            whole["pre_tokenizer"] = pre_tokenizer
        variant = tokenizers.Tokenizer.from_str(msgspec.json.encode(whole).decode())
    return variant


def _ids_of(tokenizer: tokenizers.Tokenizer) -> dict[int, tuple[str, bool]]:
    added = tokenizer.get_added_tokens_decoder()
    return {token_id: (token.content, token.special) for token_id, token in added.items()}
