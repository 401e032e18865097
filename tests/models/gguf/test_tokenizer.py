from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.models.gguf.reader import GGUFFile
from headrace.models.gguf.tokenizer import PRE_TOKENIZERS, MappedTokenizer, map_tokenizer
from tests.models.gguf.files import BYTES, MERGES, SPECIALS


def byte_level(pre: str | None = "gpt-2", **changes: Any) -> GGUFFile:
    tokens = [*SPECIALS, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<think>"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * (len(tokens) - 4) + [4], np.int32),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GGUFFile(
        Path("m.gguf"), 3, {key: value for key, value in metadata.items() if value is not None}, {}
    )


def loaded(mapped: MappedTokenizer) -> Any:
    return tokenizers.Tokenizer.from_str(json.dumps(mapped.tokenizer))


def pieces(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts ``text``."""
    mapped = map_tokenizer(byte_level(pre), 1000)
    tokenizer = loaded(mapped)
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [normal[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]


GPT4_STYLE = ["We", "'LL", " pay", " ", "123", "45", " (", "ok", ")!\n", "   ", " x"]
CUTS = {
    "gpt-2": ["We", "'", "LL", " pay", " 12345", " (", "ok", ")!", "\n   ", " x"],
    "smollm": ["We", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " (", "ok", ")!", "\n   ", " x"],
    "llama-bpe": GPT4_STYLE,
    "dbrx": GPT4_STYLE,
    "qwen2": ["We", "'LL", " pay", " ", "1", "2", "3", "4", "5", " (", "ok", ")!\n", "   ", " x"],
    "tekken": ["We", "'LL", " pay", " ", "1", "2", "3", "4", "5", " (", "ok", ")!\n", "   ", " x"],
    "gpt-4o": ["We'LL", " pay", " ", "123", "45", " (", "ok", ")!\n", "   ", " x"],
    "default": ["We", "'", "LL", " pay", " ", "123", "45", " ", "(", "ok", ")!", "\n   ", " x"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_each_pre_tokenizer_cuts_as_its_models_expect(pre: str) -> None:
    assert pieces(pre, "We'LL pay 12345 (ok)!\n    x") == CUTS[pre]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loses_nothing(pre: str) -> None:
    text = "Ünï  ́e 1½Ⅷ٣\t\r\n\n don't WE'VE 日本語 🙂‍↔️ a_b==c\u2028\xa0 "
    tokenizer = loaded(map_tokenizer(byte_level(pre), 1000))
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text).ids) == normal


def test_byte_level_bpe_merges_and_keeps_special_tokens_whole() -> None:
    mapped = map_tokenizer(byte_level(), 1000)
    tokenizer = loaded(mapped)
    assert tokenizer.encode("hello world<|im_end|><think>é").tokens == [
        "hello", "Ġworld", "<|im_end|>", "<think>", "Ã", "©",
    ]  # fmt: skip
    ids = tokenizer.encode("<|im_start|>hello<think>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<think>"
    assert mapped.eos_token_ids == [2, 0]
    assert mapped.tokenizer_config["eos_token"] == "<|im_end|>"
    assert mapped.tokenizer_config["chat_template"] == mapped.chat_template == "{{ messages }}"


def test_only_qwen_composes_characters() -> None:
    assert pieces("qwen2", "e\u0301") == ["\u00e9"]
    assert pieces("llama-bpe", "e\u0301") != ["\u00e9"]


def test_llama3_takes_a_whole_token_before_merging() -> None:
    odd = byte_level("llama-bpe", merges=["l l"])
    assert loaded(map_tokenizer(odd, 1000)).encode("hello", add_special_tokens=False).tokens == ["hello"]
    plain = byte_level("dbrx", merges=["l l"])
    assert loaded(map_tokenizer(plain, 1000)).encode("hello").tokens == ["h", "e", "ll", "o"]


@pytest.mark.parametrize(
    ("pre", "flag", "first"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_when_the_file_or_its_kind_says_so(pre: str, flag: bool | None, first: bool) -> None:
    mapped = map_tokenizer(byte_level(pre, add_bos_token=flag), 1000)
    ids = loaded(mapped).encode("hello").ids
    assert (ids[0] == 1) is first and mapped.tokenizer_config["add_bos_token"] is first


def test_eos_is_added_when_the_file_says_so() -> None:
    ids = loaded(map_tokenizer(byte_level(add_eos_token=True, add_bos_token=True), 1000)).encode("hello").ids
    assert (ids[0], ids[-1]) == (1, 2)


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"pre-tokenizer 'viking'.*smollm"):
        map_tokenizer(byte_level("viking"), 1000)
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.ggml\.pre"):
        map_tokenizer(byte_level(None), 1000)
    with pytest.raises(UnsupportedModelError, match="tokenizer 'bert'"):
        map_tokenizer(byte_level(model="bert"), 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "must be a list of strings, is none"),
        ({"tokens": ["a", "a"]}, "1 tokens appear twice"),
        ({"token_type": np.zeros(3, np.int32)}, "token_type must hold 269 numbers"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["h e", "nospace"]}, "merge 1 must be two tokens"),
        ({"merges": ["h zzz"]}, "inconsistent"),
        ({"eos_token_id": 5000}, "must be a token below 269, is int 5000"),
        ({"bos_token_id": "x"}, "must be a token below"),
    ],
)
def test_lists_that_do_not_fit_are_corrupt(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        map_tokenizer(byte_level(**changes), 1000)


def test_more_tokens_than_embedding_rows_are_corrupt() -> None:
    with pytest.raises(CorruptFileError, match="do not fit the embedding's 100 rows"):
        map_tokenizer(byte_level(), 100)


# SentencePiece


def sentence_piece(seed: int, **changes: Any) -> GGUFFile:
    """A random vocabulary over a small alphabet, closed enough that many merges compete."""
    rng = random.Random(seed)
    alphabet = "▁abcé日"
    normal = set(alphabet)
    while len(normal) < 120:
        normal.add("".join(rng.choice(sorted(normal)) for _ in range(2))[:7])
    learned = sorted(normal - set(alphabet))
    rng.shuffle(learned)
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "  ",
        "   ",
        "\n\n",
        "<x>",
        *learned,
    ]
    types = [2, 3, 3] + [6] * 256 + [4] * 4 + [1] * len(learned)
    scores = [0.0] * 259 + [-1000.0] * 4 + [-float(i) for i in range(len(learned))]
    tokens += sorted(alphabet)
    types += [1] * len(alphabet)
    scores += [-1e6] * len(alphabet)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": False,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GGUFFile(
        Path("m.gguf"), 3, {key: value for key, value in metadata.items() if value is not None}, {}
    )


class SentencePieceOracle:
    """SentencePiece BPE as its paper tells it: merge the best-scored adjacent pair until none is a piece."""

    def __init__(self, file: GGUFFile) -> None:
        get = file.metadata.get
        tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = {
            t: float(s) for t, s, k in zip(tokens, get("tokenizer.ggml.scores"), types, strict=True) if k == 1
        }
        whole = sorted(
            (t for t, k in zip(tokens, types, strict=True) if k in (2, 3, 4)), key=len, reverse=True
        )
        self.whole = re.compile("(" + "|".join(map(re.escape, whole)) + ")")
        self.prefix = get("tokenizer.ggml.add_space_prefix")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self.whole.split(text)):
            ids += [self.ids[part]] if i % 2 else self.merge(part)
        return ids

    def merge(self, text: str) -> list[int]:
        symbols = list((("▁" if self.prefix and text else "") + text).replace(" ", "▁"))
        while True:
            best = max(
                (
                    (self.scores[a + b], -i)
                    for i, (a, b) in enumerate(pairwise(symbols))
                    if a + b in self.scores
                ),
                default=None,
            )
            if best is None:
                break
            i = -best[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        ids = []
        for symbol in symbols:
            ids += (
                [self.ids[symbol]]
                if symbol in self.ids
                else [self.ids[f"<0x{b:02X}>"] for b in symbol.encode()]
            )
        return ids


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prefix", [False, True])
def test_score_merges_equal_sentence_piece(seed: int, prefix: bool) -> None:
    file = sentence_piece(seed, add_space_prefix=prefix, add_bos_token=False)
    ours, oracle = loaded(map_tokenizer(file, 1000)), SentencePieceOracle(file)
    rng = random.Random(seed)
    differing = 0
    for _ in range(500):
        text = "".join(
            rng.choice(["a", "b", "c", "é", "日", " ", " ", "\n", "ü", "🙂", "<x>"])
            for _ in range(rng.randrange(24))
        )
        differing += ours.encode(text).ids != oracle.encode(text)
    # Two ways to make one piece that overlap ("aa|a", "a|aa") are one rank there and two here.
    assert differing <= 5


def test_byte_fallback_and_decoding() -> None:
    tokenizer = loaded(map_tokenizer(sentence_piece(0, add_space_prefix=True), 1000))
    encoding = tokenizer.encode("ab 🙂 c")
    assert encoding.ids[0] == 1, "BOS by default"
    assert "<0xF0>" in encoding.tokens
    assert tokenizer.decode(encoding.ids) == "ab 🙂 c"


def test_phi3_tokens_take_the_space_after_them() -> None:
    """Its chat template writes a newline after each role, which its makers' tokenizer swallows."""
    file = sentence_piece(0, add_space_prefix=True, add_bos_token=False)
    marker = file.metadata["tokenizer.ggml.tokens"].index("<x>")
    after = loaded(map_tokenizer(file, 1000)).encode("ab").ids
    assert loaded(map_tokenizer(file, 1000)).encode("<x>\n ab").ids != [marker, *after]
    file.metadata["general.architecture"] = "phi3"
    assert loaded(map_tokenizer(file, 1000)).encode("<x>\n ab").ids == [marker, *after]


def test_roles_that_old_files_leave_out_are_sentence_pieces_own() -> None:
    mapped = map_tokenizer(sentence_piece(0), 1000)
    assert (mapped.bos_token_id, mapped.eos_token_ids[0]) == (1, 2)
    assert mapped.tokenizer_config["unk_token"] == "<unk>"


def test_missing_scores_are_corrupt() -> None:
    with pytest.raises(CorruptFileError, match="scores is missing"):
        map_tokenizer(sentence_piece(0, scores=None), 1000)
