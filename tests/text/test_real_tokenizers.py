"""The three real tokenizers: what the cache gives is what encoding everything gives."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random
from unicodedata import normalize

import pytest
import tokenizers

from headrace.text.tokenizer import Tokenizer
from tests.text.conversations import GEMMA_TEMPLATE, growing_conversations, tokenizer_folder

CONVERSATIONS = 10_000
NAMES = ("smollm2-135m", "qwen2.5-coder-1.5b", "gemma-3-270m")
TURNS = {"gemma-3-270m": ("<start_of_turn>", "<end_of_turn>")}


@pytest.fixture(scope="module", params=NAMES)
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Tokenizer]:
    name = request.param
    folder = tokenizer_folder(name, tmp_path_factory.mktemp("models") / name)
    return name, folder, Tokenizer.from_folder(folder, GEMMA_TEMPLATE if name in TURNS else None)


def test_cached_equals_full_on_random_conversations(real: tuple[str, Path, Tokenizer]) -> None:
    name, folder, tokenizer = real
    peer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = TURNS.get(name, ("<|im_start|>", "<|im_end|>"))
    begin_id, end_id = peer.token_to_id(begin), peer.token_to_id(end)
    assert begin_id is not None
    assert end_id is not None
    specials = [begin, end, "<|endoftext|>", "<bos>", "<eos>", "<|fim_prefix|>"]
    specials = [text for text in specials if text in tokenizer.segments.specials]
    assert tokenizer.segments.splits
    tokenizer.segments.clear()
    count = 0
    for messages, hostile in growing_conversations(Random(7), CONVERSATIONS, specials):
        ids = tokenizer.encode_chat(messages)
        rendered = tokenizer.render_chat(messages)
        if hostile:
            text, guard = tokenizer._template.render(messages)  # type: ignore[union-attr]
            assert ids == tokenizer.segments.encode_full(text, guard)
        else:
            assert ids == array("I", peer.encode(rendered, add_special_tokens=False).ids), repr(rendered)
        # Special tokens are the template's: one beginning and one end a turn, and the model's open turn.
        turns = rendered.count(begin) - sum(message["content"].count(begin) for message in messages)
        assert ids.count(begin_id) == turns
        assert ids.count(end_id) == turns - 1
        count += 1
    assert count >= CONVERSATIONS
    assert tokenizer.segments.hits > tokenizer.segments.misses


def test_next_turn_computes_only_what_is_new(real: tuple[str, Path, Tokenizer]) -> None:
    _, _, tokenizer = real
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"turn {i}: " + "word " * 50} for i in range(40)
    ]
    tokenizer.encode_chat(messages)
    misses = tokenizer.segments.misses
    messages.append({"role": "user", "content": "and now something new"})
    tokenizer.encode_chat(messages)
    assert tokenizer.segments.misses - misses <= 1


def test_ids_decode_to_the_rendered_text(real: tuple[str, Path, Tokenizer]) -> None:
    name, _, tokenizer = real
    specials = list(TURNS.get(name, ("<|im_start|>", "<|im_end|>")))
    for messages, _ in growing_conversations(Random(11), 300, specials):
        if name in TURNS and any("▁" in message["content"] for message in messages):
            continue  # this tokenizer cannot tell it from a space
        ids = tokenizer.encode_chat(messages)
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert normalize("NFC", decoded) == normalize("NFC", tokenizer.render_chat(messages))


def test_decoding_and_prompts_equal_the_tokenizers_package(real: tuple[str, Path, Tokenizer]) -> None:
    _, folder, tokenizer = real
    peer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    random = Random(3)
    for _ in range(300):
        ids = [random.randrange(tokenizer.vocab_size) for _ in range(random.randrange(12))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == peer.decode(ids, skip_special_tokens=skip)
    for text in ("", "Hello", " a\n", "<|im_end|> x <eos>", "日本"):
        assert tokenizer.encode(text) == array("I", peer.encode(text, add_special_tokens=True).ids)
        assert tokenizer.encode(text, False) == array("I", peer.encode(text, add_special_tokens=False).ids)
