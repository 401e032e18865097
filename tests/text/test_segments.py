"""The tokenizer cache on tokenizers whose pieces depend on their edges: equal to full, or no cutting."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headrace.core.errors import InvalidRequestError
from headrace.text.segments import SegmentCache
from headrace.text.tokenizer import Tokenizer
from tests.text import tiny


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, **{"normalized": False, **flags})


def plain(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=False, **{"normalized": False, **flags})


BASIC = [special("<|im_start|>"), special("<|im_end|>"), special("<s>")]
BACKENDS: dict[str, tuple[Callable[[], Backend], bool]] = {
    # name: (how to make it, whether texts are cut at special tokens)
    "byte level": (lambda: tiny.byte_level(BASIC), True),
    "byte level, prefix space": (lambda: tiny.byte_level(BASIC, add_prefix_space=True), True),
    "metaspace first": (lambda: tiny.sentence_piece(BASIC), True),
    "metaspace always": (lambda: tiny.sentence_piece(BASIC, prepend_scheme="always"), True),
    "metaspace never": (lambda: tiny.sentence_piece(BASIC, prepend_scheme="never"), True),
    "prepend normalizer": (lambda: tiny.sentence_piece(BASIC, style="prepend"), True),
    "gemma": (
        lambda: tiny.sentence_piece([*BASIC, plain("\n\n"), plain("▁▁"), plain("<b>")], style="gemma"),
        True,
    ),
    "word piece": (lambda: tiny.word_piece(BASIC), True),
    "unigram": (lambda: tiny.unigram(BASIC), True),
    "rstrip": (
        lambda: tiny.sentence_piece(
            [special("<|im_start|>", rstrip=True), special("<|im_end|>"), special("<s>")]
        ),
        True,
    ),
    "lstrip": (
        lambda: tiny.byte_level(
            [special("<|im_start|>", lstrip=True), special("<|im_end|>", rstrip=True), special("<s>")]
        ),
        True,
    ),
    "rstrip beside added whitespace": (
        lambda: tiny.byte_level([special("<|im_start|>", rstrip=True), *BASIC[1:], plain("\n\n")]),
        False,
    ),
    "plain tokens that overlap": (
        lambda: tiny.byte_level([*BASIC, plain("b<"), plain("<|im_end|>\n"), plain(">a")]),
        True,
    ),
    "nested specials": (lambda: tiny.byte_level([*BASIC, special("<|im_end|>x"), special("x<|im")]), True),
    "single word": (lambda: tiny.byte_level([*BASIC, plain("fox", single_word=True)]), True),
    "single word beside word edges": (
        lambda: tiny.byte_level([special("INST"), *BASIC, plain("fox", single_word=True)]),
        False,
    ),
    "single word special": (lambda: tiny.byte_level([*BASIC, special("stop", single_word=True)]), True),
    "normalized special": (
        lambda: tiny.word_piece([special("<|im_start|>", normalized=True), *BASIC[1:]]),
        True,
    ),
    "normalized plain": (
        lambda: tiny.sentence_piece([*BASIC, plain("fox b", normalized=True)], style="prepend"),
        True,
    ),
    "no special tokens": (lambda: tiny.byte_level([plain("<b>")]), False),
}
PIECES = [
    "<|im_start|>", "<|im_end|>", "<s>", "<|im_end|>x", "<|im", "_end|>", "|>", "INST", "fox",
    "stop", "fox b", "<b>", "a", "b", "x", " ", "  ", "\n", "\n\n", "\t", "\x1f", "\u00a0",
    "\u3000", "▁", "▁▁", "é", "字", "🙂", "user\n", "the quick brown", "1234", "<", ">", "A",
    "<|IM_START|>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10).map("".join)


@pytest.fixture(scope="module", params=list(BACKENDS))
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SegmentCache:
    make, cuts = BACKENDS[request.param]
    segments = tiny.load(tmp_path_factory.mktemp("model"), make()).segments
    assert segments.splits == cuts
    return segments


@settings(max_examples=250, deadline=None)
@given(text=TEXTS)
def test_cached_equals_full(cache: SegmentCache, text: str) -> None:
    assert cache.encode(text) == cache.encode(text) == cache.encode_full(text)


@settings(max_examples=120, deadline=None)
@example(text="<|im_start|><|IM_START|>", position=0)
@given(text=TEXTS, position=st.integers(0, 60))
def test_cached_equals_full_with_a_guard(cache: SegmentCache, text: str, position: int) -> None:
    guarded = text[:position] + "\ue000" + text[position:]
    assert cache.encode(guarded, "\ue000") == cache.encode_full(guarded, "\ue000")


def test_guarded_special_text_becomes_no_special_token(tmp_path: Path) -> None:
    for make in (tiny.byte_level, tiny.sentence_piece):
        tokenizer = tiny.load(tmp_path, make())
        (special_id,) = tokenizer.segments.encode("<s>")
        ids = tokenizer.segments.encode("<s>a <\ue000s> b", "\ue000")
        assert ids[0] == special_id
        assert special_id not in ids[1:]
        assert tokenizer.decode(ids[1:], skip_special_tokens=False).strip() == "a <s> b"


def test_memory_is_bounded_and_evicts_the_oldest(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level())
    cache = Tokenizer.from_folder(folder, cache_bytes=20_000).segments
    for number in range(300):
        cache.encode(f"<s>the quick brown fox {number}<s>")
        assert cache.nbytes <= 20_000
    misses = cache.misses
    cache.encode("<s>the quick brown fox 299<s>")
    assert cache.misses == misses
    cache.encode("<s>the quick brown fox 0<s>")
    assert cache.misses == misses + 1
    long = "word " * 10_000
    assert cache.encode(long) == cache.encode_full(long)
    assert cache.nbytes <= 20_000


def test_one_cache_serves_many_threads(tmp_path: Path) -> None:
    cache = Tokenizer.from_folder(tiny.write(tmp_path, tiny.byte_level()), cache_bytes=30_000).segments
    texts = [f"<s>turn {i % 40}<|im_end|>the fox {i % 7}" + "\ue000<s>" * (i % 2) for i in range(400)]
    guards = ["\ue000" if i % 2 else None for i in range(400)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(cache.encode, texts, guards))
    assert results == [cache.encode_full(text, guard) for text, guard in zip(texts, guards, strict=True)]
    assert 0 <= cache.nbytes <= 30_000


def test_half_a_surrogate_pair_is_the_callers_mistake(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level())
    for text in ("a\ud800b", "<s>\udfff"):
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            tokenizer.encode(text)
    assert tokenizer.encode("fox") == tokenizer.segments.encode_full("fox")


def test_ids_are_packed(tmp_path: Path) -> None:
    ids = tiny.load(tmp_path, tiny.byte_level()).encode("fox")
    assert isinstance(ids, array)
    assert ids.itemsize == 4
