"""Detokenizing a few ids at a time: the pieces join to the whole, and no half character is shown early."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from headrace.text.detokenizer import TableDecoder, WholeDecoder
from headrace.text.tokenizer import Tokenizer
from tests.text import tiny

BACKENDS: dict[str, tuple[Callable[[], Backend], type]] = {
    "byte level": (tiny.byte_level, TableDecoder),
    "metaspace": (tiny.sentence_piece, TableDecoder),
    "llama 2": (lambda: tiny.sentence_piece(style="prepend"), TableDecoder),
    "gemma": (lambda: tiny.sentence_piece(style="gemma"), TableDecoder),
    "unigram": (tiny.unigram, TableDecoder),
    "word piece": (tiny.word_piece, WholeDecoder),
}


@pytest.fixture(scope="module", params=list(BACKENDS))
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Backend]:
    make, kind = BACKENDS[request.param]
    backend = make()
    tokenizer = tiny.load(tmp_path_factory.mktemp("model"), backend)
    assert isinstance(tokenizer.detokenizer(), kind)
    return tokenizer, backend


IDS = st.lists(st.integers(0, 620), max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=6)


def broken_after_a_character(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether a run of byte tokens has a whole character in it and is no UTF-8: see _FallbackBytes."""
    vocabulary = tokenizer._vocabulary
    run = b""
    for token_id in [*ids, -1]:
        if token_id in vocabulary.byte_ids:
            run += vocabulary.token_bytes(token_id)
        elif token_id == -1 or (
            vocabulary.has(token_id) and not (skip and token_id in vocabulary.special_ids)
        ):
            if run and "\ufffd" in run.decode("utf-8", "replace") and run.decode("utf-8", "ignore"):
                return True
            run = b""
    return False


@settings(max_examples=300, deadline=None)
@given(ids=IDS, cuts=CUTS, skip=st.booleans())
def test_pieces_join_to_the_whole(
    loaded: tuple[Tokenizer, Backend], ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer, backend = loaded
    decoder = tokenizer.detokenizer(skip_special_tokens=skip)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [decoder.push(ids[start:end]) for start, end in pairwise(edges)]
    joined = "".join(pieces) + decoder.finish()
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)
    assume(not broken_after_a_character(tokenizer, ids, skip))
    assert joined == backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20))
def test_no_half_character_is_shown(loaded: tuple[Tokenizer, Backend], text: str) -> None:
    tokenizer, _ = loaded
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume("\ufffd" not in text)
    decoder = tokenizer.detokenizer(skip_special_tokens=False)
    assert "\ufffd" not in "".join([decoder.push([token_id]) for token_id in ids])


def test_text_roundtrips_byte_level(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level())
    for text in ("", " ", "héllo  wörld\n", "👩‍👩‍👧‍👦 🇫🇷", "\x00\x01\x7f", "Ġ▁"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_skipped_on_request(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level())
    ids = tokenizer.encode("<s>fox<|im_end|>")
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>fox<|im_end|>"


def test_a_continuation_keeps_its_leading_space(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.sentence_piece(style="prepend"))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the fox"
    decoder = tokenizer.detokenizer(continuation=True)
    assert decoder.push(ids) + decoder.finish() == " the fox"


def test_byte_fallback_shows_characters_as_they_complete(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.sentence_piece(style="gemma"))
    first = tokenizer._backend.token_to_id("<0x00>")
    assert first is not None
    decoder = tokenizer.detokenizer()
    shown = [decoder.push([first + byte]) for byte in "é字".encode() + b"\xf0\x9f"]
    assert shown == ["", "é", "", "", "字", "", ""]
    assert decoder.finish() == "\ufffd\ufffd"


def test_ids_the_tokenizer_lacks_add_nothing(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level())
    ids = [*tokenizer.encode("fox"), 100_000, -1, 2**40]
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.token_bytes(2**40) == b""
