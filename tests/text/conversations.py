"""Random conversations made to trip a tokenizer, and the real tokenizers to try them on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from headrace.models.gguf.config import map_model
from headrace.models.gguf.convert import folder_for_digest
from headrace.models.gguf.reader import read_gguf
from headrace.models.gguf.tokenizer import map_tokenizer
from headrace.models.packages import SHORT_NAMES, package_file

GEMMA_TEMPLATE = """{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == \
'assistant' else message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_PIECES = [
    "Hello", " world", "the", " a", " I'm", "don't", "x = [1, 2]", "def f():\n    return 0\n",
    "if (a<b) {", "}", "\t", " ", "  ", "   ", "\n", "\n\n", "\r\n", "    \n", "1", "2024",
    " 3.14159", "!?", "...", "<", ">", "|", "<|", "|>", "</", "ß", "é", "e\u0301", "naïve",
    "日本語", "中文字", "한국어", "हिन्दी", "العربية", "🙂", "👩‍👩‍👧‍👦", "🇫🇷", "\u200b",
    "\u00a0", "\u3000", "\x00", "\x1f", "▁", "Ġ", "<0x0A>", "https://a.b/c?d=e&f=g", "<table>",
    "<tool_call>", "\ue000", "\ufffd", "a" * 20, "-" * 12, "TitleCaseWord", "snake_case_name",
    "ÅÄÖ", "ﬁ", "Ω≈ç√", "\U00010348",
]  # fmt: skip


def tokenizer_folder(name: str, scratch: Path) -> Path:
    """A short name's folder if it was converted before; otherwise its tokenizer's files alone."""
    short = SHORT_NAMES[name]
    folder = folder_for_digest(short.sha256, "bfloat16")
    if folder is not None:
        return folder
    file = read_gguf(package_file(short))
    mapped = map_tokenizer(file, map_model(file).config["vocab_size"])
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "tokenizer.json").write_text(json.dumps(mapped.tokenizer), "utf-8")
    (scratch / "tokenizer_config.json").write_text(json.dumps(mapped.tokenizer_config), "utf-8")
    if mapped.chat_template is not None:
        (scratch / "chat_template.jinja").write_text(mapped.chat_template, "utf-8")
    return scratch


def random_text(random: Random, extra: list[str]) -> str:
    pieces = [random.choice(_PIECES) for _ in range(random.randrange(7))]
    if extra and random.random() < 0.5:
        pieces.insert(random.randrange(len(pieces) + 1), random.choice(extra))
    return "".join(pieces)


def growing_conversations(
    random: Random, count: int, specials: list[str]
) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Each conversation turn by turn: (messages so far, whether special-token text is in them)."""
    broken = [text[:-1] for text in specials] + [text[1:] for text in specials]
    for _ in range(count):
        extra = specials + broken if random.random() < 0.25 else []
        messages: list[dict[str, Any]] = []
        if random.random() < 0.3:
            messages.append({"role": "system", "content": random_text(random, extra)})
        for _ in range(random.randrange(1, 4)):
            messages.append({"role": "user", "content": random_text(random, extra)})
            hostile = any(special in message["content"] for message in messages for special in specials)
            yield list(messages), hostile
            messages.append({"role": "assistant", "content": random_text(random, extra)})
