"""Text streams: stop strings against a naive oracle, hold-back, counting, and aligned log-probabilities."""

from __future__ import annotations

import itertools
import tracemalloc
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages import TokenLogprobs
from headrace.core.request import SamplingParams
from headrace.text.stop import StopStrings
from headrace.text.stream import TextDelta, TextStream, describe_prompt
from headrace.text.tokenizer import Tokenizer
from tests.text import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny.load(tmp_path_factory.mktemp("model"), tiny.byte_level(), eos_token="<|im_end|>")


def entries(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5), (7, -1.5)]) for token_id in ids]


def oracle(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, int, str | None]:
    """Text, tokens counted and stop string of generating token by token and looking after each one."""
    before = ""
    for count in range(1, len(ids) + 1):
        decoder = tokenizer.detokenizer(continuation=True)
        text = decoder.push(ids[:count])
        if count > min_tokens:
            found = [
                (start, start + len(stop), stop)
                for stop in stops
                for start in range(len(text) - len(stop) + 1)
                if text.startswith(stop, start) and start + len(stop) > len(before)
            ]
            if found:
                start, end, stop = min(found)
                return text[: end if include else start], count, stop
        before = text
    decoder = tokenizer.detokenizer(continuation=True)
    text = decoder.push(ids) + decoder.finish()
    return text, len(ids), None


WORDS = ["a", "b", "ab", "aba", " ", "the", " fox", "\n", "é", "字", "<s>", "quick"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
STOPS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map("".join), max_size=3)


@settings(max_examples=600, deadline=None)
@given(
    text=TEXTS,
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    with_logprobs=st.booleans(),
)
def test_stop_strings_equal_the_oracle(
    tokenizer: Tokenizer,
    text: str,
    stops: list[str],
    include: bool,
    min_tokens: int,
    cuts: list[int],
    with_logprobs: bool,
) -> None:
    ids = tokenizer.encode(text).tolist()
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        max_tokens=None,
        logprobs=1 if with_logprobs else None,
    )
    stream = TextStream(tokenizer, params)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    deltas: list[TextDelta] = []
    shown = ""
    for start, end in pairwise(edges):
        part = ids[start:end]
        deltas.append(stream.push(part, entries(part) if with_logprobs else None))
        shown += deltas[-1].text
        assert shown == stream.text
    deltas.append(stream.push([], None, "length"))
    expected, count, stop = oracle(tokenizer, ids, stops, include, min_tokens)
    assert stream.text == expected
    assert stream.num_tokens == sum(delta.num_tokens for delta in deltas) == count
    assert stream.token_ids == ids[:count]
    ends = [delta for delta in deltas if delta.finish_reason is not None]
    assert len(ends) == 1
    assert ends[0].finish_reason == ("length" if stop is None else "stop")
    assert ends[0].stop_reason == stop
    if with_logprobs:
        shown_tokens = [entry for delta in deltas for entry in delta.logprobs or []]
        assert [entry.token_id for entry in shown_tokens] == ids[: len(shown_tokens)]
        if stop is None:
            assert len(shown_tokens) == len(ids)
        for entry in shown_tokens:
            if not tokenizer.is_special(entry.token_id) and "\ufffd" not in entry.token and stop is None:
                assert stream.text[entry.text_offset :].startswith(entry.token)


def test_nothing_of_a_stop_string_is_shown_early(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=["abX"], max_tokens=None))
    shown = [stream.push(tokenizer.encode(part).tolist()).text for part in ("1", "a", "b", "a", "c")]
    assert shown == ["1", "", "", "ab", "ac"]


def test_a_stop_string_asks_for_an_abort_only_while_the_engine_runs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a stop b").tolist()
    for reason in (None, "length"):
        stream = TextStream(tokenizer, SamplingParams(stop=["stop"], max_tokens=None))
        delta = stream.push(ids, None, reason)
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a ", "stop", "stop")
        assert delta.needs_abort == (reason is None)
        assert stream.finished
        assert stream.push(ids) == TextDelta()


def test_the_stop_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    word, end = tokenizer.encode("a").tolist(), tokenizer.encode("<|im_end|>").tolist()
    for stop_token in (end, tokenizer.encode("b").tolist()):
        stream = TextStream(tokenizer, SamplingParams(max_tokens=None, logprobs=0))
        delta = stream.push(word + stop_token, entries(word + stop_token), "stop", stop_token[0])
        assert (delta.text, delta.num_tokens, delta.stop_reason) == ("a", 2, stop_token[0])
        assert [entry.token for entry in delta.logprobs or []] == ["a"]
    params = SamplingParams(max_tokens=None, include_stop_str_in_output=True, skip_special_tokens=False)
    assert TextStream(tokenizer, params).push(word + end, None, "stop", end[0]).text == "a<|im_end|>"


def test_half_a_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🙃")[:-1].tolist()
    stream = TextStream(tokenizer, SamplingParams(max_tokens=None, logprobs=0))
    delta = stream.push(ids, entries(ids))
    assert delta.text == "x"
    last = stream.finish("length")
    assert stream.text.startswith("x")
    assert set(last.text) == {"\ufffd"}
    shown = [*(delta.logprobs or []), *(last.logprobs or [])]
    assert b"".join(entry.bytes for entry in shown) == "x🙃".encode()[: len(b"".join(e.bytes for e in shown))]
    assert len(shown) == len(ids)


def test_log_probabilities_carry_tokens_bytes_and_offsets(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox é").tolist()
    stream = TextStream(tokenizer, SamplingParams(max_tokens=None, logprobs=2), text_offset=10)
    shown = [entry for token in ids for entry in stream.push([token], entries([token])).logprobs or []]
    shown += stream.finish("length").logprobs or []
    assert b"".join(entry.bytes for entry in shown).decode() == "the fox é"
    assert shown[0].text_offset == 10
    assert [entry.text_offset for entry in shown] == sorted(entry.text_offset for entry in shown)
    assert shown[0].top[1].token_id == 7
    assert shown[0].top[1].logprob == -1.5


def test_prompt_log_probabilities_begin_with_none(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick fox").tolist()
    described = describe_prompt(tokenizer, ids, [None, *entries(ids[1:])])
    assert described[0].logprob is None
    assert [entry.token for entry in described] == [tokenizer.token_text(token) for token in ids]
    assert all("the quick fox"[entry.text_offset :].startswith(entry.token) for entry in described)


def test_finding_prefers_what_completes_and_starts_first() -> None:
    stops = StopStrings(["bcd", "cd", "abcde"])
    assert stops.find("xabcd", 0) == (2, 5, "bcd")
    assert stops.find("xabcd", 5) is None
    assert stops.held("xab") == 2
    assert stops.held("xyz") == 0
    assert not StopStrings([])


def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string() -> None:
    strings = ["ab", "abab", "abc", "b", "cab", "caba"]
    stops = StopStrings(strings)
    beginnings = {string[:end] for string in strings for end in range(1, len(string))}
    for letters in itertools.product("abcx", repeat=5):
        text = "".join(letters)
        ends = [text[start:] for start in range(len(text)) if text[start:] in beginnings]
        assert stops.held(text) == max(map(len, ends), default=0), text


def test_a_long_stop_string_costs_no_more_than_itself() -> None:
    tracemalloc.start()
    try:
        stops = StopStrings(["x" * 1_000_000])
        assert stops.held("abcxx") == 2
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_long_answer_is_given_out_piece_by_piece(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level())
    ids = tokenizer.encode("the quick brown fox " * 500).tolist()
    stream = TextStream(tokenizer, SamplingParams(max_tokens=None, stop=["never"]))
    assert "".join([stream.push([token]).text for token in ids]) + stream.finish("length").text == (
        "the quick brown fox " * 500
    )


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("skip", [False, True])
def test_whole_texts_of_a_transparent_stream_are_its_text(tmp_path: Path, kind: str, skip: bool) -> None:
    """What a gateway does: tokens are shown without being pushed wherever the stream allows it."""
    tokenizer = tiny.load(tmp_path, getattr(tiny, kind)(), eos_token="</s>")
    random = Random(kind)
    params = SamplingParams(max_tokens=None, skip_special_tokens=skip)
    num_shown = 0
    for _ in range(200):
        ids = tokenizer.encode(random.choice(["the fox é 字🙃", "a\u2028b", "x", "<s> quick"])).tolist()
        ids += [random.randrange(tokenizer.vocab_size + 3) for _ in range(random.randrange(12))]
        stream, pushed = TextStream(tokenizer, params), TextStream(tokenizer, params)
        shown = ""
        for token_id in ids:
            text = tokenizer.whole_text(token_id, skip) if stream.transparent else None
            num_shown += text is not None
            shown += stream.push([token_id]).text if text is None else text
            pushed.push([token_id])
            assert shown == pushed.text
        assert shown + stream.finish("length").text == pushed.text + pushed.finish("length").text
    assert num_shown > 400


def test_a_stream_that_looks_at_tokens_is_not_transparent(tokenizer: Tokenizer) -> None:
    for params in (SamplingParams(stop=["x"], max_tokens=None), SamplingParams(logprobs=0, max_tokens=None)):
        stream = TextStream(tokenizer, params)
        assert not stream.transparent
        stream.push(tokenizer.encode("the").tolist(), entries([1]))
        assert not stream.transparent
    stream = TextStream(tokenizer, SamplingParams(max_tokens=None))
    assert stream.transparent
    stream.push(tokenizer.encode("🙃").tolist()[:1])
    assert not stream.transparent, "half a character is waited for"
    stream.push([], None, "length")
    assert not stream.transparent
