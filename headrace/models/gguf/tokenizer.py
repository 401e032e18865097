"""The tokenizer inside a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds are known. ``gpt2``: byte-level BPE with its merges in the file; how text is cut before merging
is only a name there, so every name maps to the pattern its models were trained with. ``llama``:
SentencePiece BPE, whose merges follow from the scores: the pair whose union scores best merges first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import tokenizers

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.models.gguf.reader import GGUFFile, describe


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a family of byte-level vocabularies cuts text before merging."""

    steps: tuple[dict[str, Any], ...]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token as a whole is taken as it is
    add_bos: bool = False  # when the file does not say


_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> dict[str, Any]:
    """The GPT-4 pattern, with numbers cut into runs of ``digits``."""
    return _split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|{_TAIL}")


_LLAMA3 = PreTokenizer((_words("{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(""),), nfc=True)
_ONE_DIGIT = PreTokenizer(({"type": "Digits", "individual_digits": True}, _split(_GPT2)))
_PLAIN = PreTokenizer((_split(_GPT2),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": PreTokenizer((_words("{1,3}"),)),
    "smaug-bpe": PreTokenizer((_words("{1,3}"),)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _ONE_DIGIT,
    "starcoder": _ONE_DIGIT,
    "refact": _ONE_DIGIT,
    "tekken": PreTokenizer((_split(_CASED % ("", "", "")),), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_split(_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")),)),
    "default": PreTokenizer(
        (_split(r"[\p{P}$+<=>^~|]+"), _split(_GPT2), _split(r"\p{N}+"), _split("[0-9][0-9][0-9]"))
    ),
}

_END_OF_TURN = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<|return|>", "<eos>", "</s>", "<EOT>", "_<EOT>", "<|EOT|>",
    }
)  # fmt: skip
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


@dataclass(frozen=True)
class MappedTokenizer:
    """``tokenizer`` and ``tokenizer_config`` as their JSON files hold them; ids that start and end text."""

    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: list[int]  # the model's own first, then other ends of a turn
    pad_token_id: int | None


def map_tokenizer(file: GGUFFile, vocab_size: int) -> MappedTokenizer:
    """The file's tokenizer; ``vocab_size`` is the number of rows of the embedding.

    Raises UnsupportedModelError for a kind or pre-tokenizer not known here, CorruptFileError where lists
    do not fit together.
    """
    vocabulary = _Vocabulary(file, vocab_size)
    kind = file.string("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(vocabulary)
    elif kind == "llama":
        parts = _sentence_piece(vocabulary)
    else:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer {kind!r} cannot be read from GGUF; supported are gpt2 and llama",
            hint="Use the model's Hugging Face folder (tokenizer.json) instead.",
        )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "post_processor": vocabulary.post_processor(byte_level=kind == "gpt2"),
        **parts,
    }
    text = json.dumps(tokenizer, ensure_ascii=False)
    try:
        known = tokenizers.Tokenizer.from_str(text).get_vocab_size(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        vocabulary.corrupt(f"the tokenizer is inconsistent: {error}")
    if known != len(vocabulary.tokens):
        vocabulary.corrupt(f"the tokenizer has {len(vocabulary.tokens)} tokens, {known} after building it")
    return MappedTokenizer(
        tokenizer,
        vocabulary.config(),
        vocabulary.chat_template,
        vocabulary.roles["bos"],
        vocabulary.eos_token_ids(),
        vocabulary.roles["pad"],
    )


class _Vocabulary:
    """Tokens, their types and the tokens with a role, checked against each other."""

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self.file = file
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            self.corrupt(f"tokenizer.ggml.tokens must be a list of strings, is {describe(tokens)}")
        if not 0 < len(tokens) <= vocab_size:
            self.corrupt(f"{len(tokens)} tokens do not fit the embedding's {vocab_size} rows")
        self.tokens: list[str] = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            self.corrupt(f"{len(tokens) - len(self.ids)} tokens appear twice")
        self.types = self.numbers("token_type", np.int64)
        if self.types is None:
            self.types = np.full(len(tokens), TokenType.NORMAL, np.int64)
        self.roles = {role: self.role(key) for role, key in _ROLES.items()}
        template = file.metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        self.add_bos = self.flag("add_bos_token", False)

    def corrupt(self, message: str) -> NoReturn:
        raise CorruptFileError(f"{self.file.path}: {message}")

    def numbers(self, key: str, dtype: type) -> Any:
        values = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return None
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            self.corrupt(f"tokenizer.ggml.{key} must hold {len(self.tokens)} numbers, is {describe(values)}")
        return values.astype(dtype)

    def role(self, key: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            self.corrupt(
                f"tokenizer.ggml.{key} must be a token below {len(self.tokens)}, is {describe(value)}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    def of_types(self, *kinds: TokenType) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.isin(self.types, kinds))]

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are matched whole before anything else: controls, and what the model's makers added."""
        special = {*self.of_types(TokenType.CONTROL, TokenType.UNKNOWN)}
        special |= {i for i in self.roles.values() if i is not None and self.types[i] != TokenType.BYTE}
        # Phi-3's own tokens swallow the white space after them; GGUF has no place to say so.
        strips = (
            self.file.architecture == "phi3" and self.file.metadata.get("tokenizer.ggml.model") == "llama"
        )
        return [
            {
                "id": i,
                "content": self.tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and self.tokens[i] not in _PHI3_KEEPS_SPACE,
                "normalized": False,
                "special": i in special,
            }
            for i in sorted(special | {*self.of_types(TokenType.USER_DEFINED)})
            if self.tokens[i]
        ]

    def post_processor(self, *, byte_level: bool) -> dict[str, Any] | None:
        """Puts BOS (and EOS) around a text when the model wants it."""
        steps: list[dict[str, Any]] = []
        if byte_level:
            steps.append(
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
            )
        ends = [self.roles["bos"] if self.add_bos else None]
        ends.append(self.roles["eos"] if self.flag("add_eos_token", False) else None)
        if any(end is not None for end in ends):
            tokens = [None if end is None else self.tokens[end] for end in ends]

            def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
                pieces: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
                if tokens[0] is not None:
                    pieces.insert(0, {"SpecialToken": {"id": tokens[0], "type_id": type_id}})
                if tokens[1] is not None:
                    pieces.append({"SpecialToken": {"id": tokens[1], "type_id": type_id}})
                return pieces

            steps.append(
                {
                    "type": "TemplateProcessing",
                    "single": around("A", 0),
                    "pair": around("A", 0) + around("B", 1),
                    "special_tokens": {
                        token: {"id": token, "ids": [end], "tokens": [token]}
                        for token, end in zip(tokens, ends, strict=True)
                        if token is not None
                    },
                }
            )
        if len(steps) == 2:
            return {"type": "Sequence", "processors": steps}
        return steps[0] if steps else None

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "add_eos_token": self.flag("add_eos_token", False),
            "clean_up_tokenization_spaces": False,
        }
        for role, i in self.roles.items():
            if i is not None:
                config[f"{role}_token"] = self.tokens[i]
        length = self.file.metadata.get(f"{self.file.architecture}.context_length")
        if isinstance(length, int):
            config["model_max_length"] = length
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return config

    def eos_token_ids(self) -> list[int]:
        ids = [self.roles["eos"], self.role("eot_token_id"), self.role("eom_token_id")]
        ids += [i for i in self.of_types(TokenType.CONTROL) if self.tokens[i] in _END_OF_TURN]
        return list(dict.fromkeys(i for i in ids if i is not None))


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    file = vocabulary.file
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None and file.architecture in ("qwen2", "qwen3"):
        name = "qwen2"
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        there = f"pre-tokenizer {name!r}" if name is not None else "no tokenizer.ggml.pre"
        raise UnsupportedModelError(
            f"{file.path}: {there}; supported are {', '.join(PRE_TOKENIZERS)}",
            hint="Convert the model again with a current converter, or use its Hugging Face folder.",
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        vocabulary.corrupt("tokenizer.ggml.merges is missing")
    vocabulary.add_bos = vocabulary.flag("add_bos_token", pre.add_bos)
    pairs = [merge.split(" ") if isinstance(merge, str) else [] for merge in merges]
    wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if wrong is not None:
        vocabulary.corrupt(f"merge {wrong} must be two tokens, is {describe(merges[wrong])}")
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pre.steps, bytes_only]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary.ids,
            "merges": pairs,
        },
    }


def _sentence_piece(vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = vocabulary.numbers("scores", np.float64)
    if scores is None:
        vocabulary.corrupt("tokenizer.ggml.scores is missing")
    for role, default in (("bos", 1), ("eos", 2), ("unk", 0)):
        # SentencePiece's own numbers, which old files leave out.
        if vocabulary.roles[role] is None and default < len(vocabulary.tokens):
            vocabulary.roles[role] = default
    vocabulary.add_bos = vocabulary.flag("add_bos_token", True)
    prefix = vocabulary.flag("add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.roles["unk"]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
        if prefix
        else replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": _merges_from_scores(vocabulary, scores),
        },
    }


def _merges_from_scores(vocabulary: _Vocabulary, scores: Any) -> list[list[str]]:
    """Every way to make a piece of two others, best-scored pieces first.

    Controls, bytes and user-defined tokens take no part: SentencePiece never merges into or out of them.
    """
    pieces = {vocabulary.tokens[i]: i for i in vocabulary.of_types(TokenType.NORMAL, TokenType.UNUSED)}
    merges = []
    # Descending score, then id: the order in which SentencePiece lists pieces that score the same.
    for i in np.argsort(-scores, kind="stable"):
        piece = vocabulary.tokens[i]
        if piece not in pieces:
            continue
        pairs = [
            (pieces[piece[:cut]], pieces[piece[cut:]])
            for cut in range(1, len(piece))
            if piece[:cut] in pieces and piece[cut:] in pieces
        ]
        merges += [[vocabulary.tokens[left], vocabulary.tokens[right]] for left, right in sorted(pairs)]
    return merges
