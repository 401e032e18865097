"""Small tokenizers of every kind that treats the edges of a piece of text in its own way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headrace.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "  def main():\n    return [x for x in range(10)]\n\n",
    "Grüße aus Köln, 東京 and 🙂🙃; 1234567890 <b>bold</b>",
    "user assistant system <|im_start|> a < b | c > d </s> [INST] hello world\n",
] * 3
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = [
    AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>", "<s>")
]


def byte_level(added: list[AddedToken] | None = None, *, add_prefix_space: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return _train(backend, trainer, added)


def sentence_piece(
    added: list[AddedToken] | None = None, *, style: str = "metaspace", prepend_scheme: str = "first"
) -> Backend:
    """BPE with byte fallback. ``style``: "metaspace", "prepend" (Llama 2's normalizer) or "gemma"."""
    pieces = [f"<0x{value:02X}>" for value in range(256)]
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    elif style == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    if style != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *pieces], show_progress=False, max_token_length=8
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Training made the byte pieces added tokens; in real files they are plain vocabulary.
    whole = json.loads(backend.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] == "<unk>"]
    backend = Backend.from_str(json.dumps(whole))
    return _add(backend, added)


def word_piece(added: list[AddedToken] | None = None) -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    return _train(backend, trainer, added)


def unigram(added: list[AddedToken] | None = None) -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    return _train(backend, trainer, added)


def with_bos(backend: Backend, token: str = "<s>") -> Backend:
    token_id = backend.token_to_id(token)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
    )
    return backend


def write(
    folder: Path,
    backend: Backend,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def load(folder: Path, backend: Backend, **config: Any) -> Tokenizer:
    """The tokenizer as the system reads it from a model's folder."""
    return Tokenizer.from_folder(write(folder, backend, config))


def _train(backend: Backend, trainer: Any, added: list[AddedToken] | None) -> Backend:
    backend.train_from_iterator(CORPUS, trainer)
    return _add(backend, added)


def _add(backend: Backend, added: list[AddedToken] | None) -> Backend:
    for token in SPECIALS if added is None else added:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    return backend
