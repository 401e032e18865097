"""Workloads made from a seed: the same seed gives the same prompts on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

# Common words, most frequent first: drawn by Zipf's law they give text that tokenizers meet in practice.
_FREQUENT = """
the of and to in is that it was for on are with as be at this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way
could people my than first water been call who oil its now find long down day did get come made may part
over new sound take only little work know place year live me back give most very after thing our just name
good sentence man think say great where help through much before line right too mean old any same tell boy
follow came want show also around form three small set put end does another well large must big even such
because turn here why ask went men read need land different home us move try kind hand picture again
change off play spell air away animal house point page letter mother answer found study still learn should
world engine pressure measurement system request latency memory schedule replica network protocol deadline
resolution temperature estimate boundary hypothesis comparison throughput architecture consequence
maintenance infrastructure
"""
_WORDS = tuple(_FREQUENT.split())
_NAMES = ("Amara", "Björn", "Chen", "Dilnoza", "Esteban", "Fatima", "Grzegorz", "Hana", "Ikaika", "João")
_CODE = (
    "def {a}_{b}({c}, limit={n}):\n    total = 0\n    for item in {c}:\n        total += item.{a}\n"
    "    return min(total, limit)\n",
    "SELECT {a}, count(*) AS {b} FROM {c} WHERE {a} > {n} GROUP BY {a} ORDER BY {b} DESC;\n",
    '{{"{a}": {n}, "{b}": ["{c}", "{a}"], "ratio": 0.{n}, "ok": true}}\n',
)


def token_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """``length`` random ids away from both ends of the vocabulary, where special tokens are."""
    margin = min(1000, vocab_size // 4)
    return [rng.randrange(margin, vocab_size - margin) for _ in range(length)]


def token_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts that share no prefix, so that no prefix cache can help."""
    return [token_prompt(rng, length, vocab_size) for _ in range(count)]


def paragraphs(rng: random.Random) -> Iterator[str]:
    """Endless paragraphs: prose, with figures, names, code, JSON and Markdown now and then."""
    weights = [1.0 / rank for rank in range(1, len(_WORDS) + 1)]
    while True:
        kind = rng.random()
        if kind < 0.15:
            a, b, c = rng.choices(_WORDS[40:], k=3)
            yield "```\n" + rng.choice(_CODE).format(a=a, b=b, c=c, n=rng.randrange(10, 9999)) + "```\n\n"
            continue
        if kind < 0.25:
            yield (
                "".join(
                    f"{number}. {' '.join(rng.choices(_WORDS, weights, k=rng.randrange(4, 12)))}\n"
                    for number in range(1, rng.randrange(3, 7))
                )
                + "\n"
            )
            continue
        sentences = []
        for _ in range(rng.randrange(2, 6)):
            words = rng.choices(_WORDS, weights, k=rng.randrange(6, 22))
            if rng.random() < 0.3:
                words.insert(rng.randrange(len(words)), rng.choice(_NAMES))
            if rng.random() < 0.2:
                words.insert(rng.randrange(len(words)), f"{rng.randrange(1, 100000)}")
            if len(words) > 12:
                words[len(words) // 2] += ","
            sentence = " ".join(words)
            sentences.append(sentence[0].upper() + sentence[1:] + rng.choice(".....?!"))
        yield " ".join(sentences) + "\n\n"


def text_of_length(rng: random.Random, num_tokens: int, count: Callable[[str], int]) -> str:
    """Text that ``count`` says has at most ``num_tokens`` tokens, and less than a paragraph fewer."""
    pieces: list[str] = []
    total = 0
    for paragraph in paragraphs(rng):
        length = count(paragraph)
        if total + length > num_tokens:
            return "".join(pieces)
        total += length
        pieces.append(paragraph)
    raise AssertionError("paragraphs() never ends")


def conversation(
    rng: random.Random, num_tokens: int, turn_tokens: int, count: Callable[[str], int]
) -> list[dict[str, str]]:
    """Messages of alternating roles, about ``turn_tokens`` each and ``num_tokens`` in all.

    Begins and ends with the user, as a request for an answer does.
    """
    num_turns = max(1, round(num_tokens / turn_tokens)) | 1
    return [
        {
            "role": "user" if turn % 2 == 0 else "assistant",
            "content": text_of_length(rng, num_tokens // num_turns, count).strip(),
        }
        for turn in range(num_turns)
    ]
