"""A small random model with a tokenizer, as a folder that `headrace serve` takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.gateway.tiny import write_tokenizer
from tests.models.tiny import make_tiny

VOCAB = 400
END_TOKEN = 2
MAX_LEN = 512


def write_model(folder: Path, *, vocab_size: int = VOCAB, max_len: int = MAX_LEN, **overrides: Any) -> Path:
    """A llama of three layers whose every token has a text; it hardly ever ends by itself.

    ``overrides`` are further fields of its configuration.
    """
    overrides |= {"eos_token_id": END_TOKEN, "max_position_embeddings": max_len}
    make_tiny("llama", folder, vocab_size=vocab_size, **overrides)
    text = write_tokenizer(folder / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(text / name, folder / name)
    shutil.rmtree(text)
    return folder
