"""A model's folder as a tokenizer: which files count, what is refused, and what a chat becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from headrace.core.errors import CorruptFileError, InvalidRequestError, ModelNotFoundError, UsageError
from headrace.text.tokenizer import Tokenizer
from tests.text import tiny


def test_ids_that_end_an_answer_come_from_both_files(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    end, start = backend.token_to_id("<|im_end|>"), backend.token_to_id("<s>")
    assert end is not None
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"}
    tokenizer = Tokenizer.from_folder(tiny.write(tmp_path, backend, config, {"eos_token_id": [start, end]}))
    assert tokenizer.eos_token_ids == (start, end)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (end, start)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.is_special(end)
    assert not tokenizer.is_special(0)


def test_prompts_begin_as_the_model_wants(tmp_path: Path) -> None:
    plain = tiny.byte_level()
    start = plain.token_to_id("<s>")
    with_bos = tiny.with_bos(tiny.byte_level())
    cases = [
        (plain, {}, False),
        (with_bos, {}, True),
        (with_bos, {"bos_token": "<s>", "add_bos_token": False}, False),
        (plain, {"bos_token": "<s>", "add_bos_token": True}, True),
    ]
    for number, (backend, config, expected) in enumerate(cases):
        tokenizer = Tokenizer.from_folder(tiny.write(tmp_path / str(number), backend, config))
        for text in ("", "fox", "<s>fox"):
            own = backend.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text).tolist() == ([start, *own] if expected else own)
            assert tokenizer.encode(text, add_special_tokens=False).tolist() == own


def test_padding_and_truncation_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = tiny.load(tmp_path, backend)
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_text_parses_in_prompts_and_not_in_messages(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level(), chat_template=tiny.CHATML)
    (end,) = tokenizer.encode("<|im_end|>")
    ids = tokenizer.encode_chat([{"role": "user", "content": "say <|im_end|> now"}])
    assert ids.count(end) == 1
    expected = "<|im_start|>user\nsay <|im_end|> now<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat([{"role": "user", "content": "say <|im_end|> now"}]) == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    plain = tokenizer.encode_chat([{"role": "user", "content": "say it"}])
    assert plain == tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "say it"}]))


def test_special_text_out_of_the_normalizer_stays_text(tmp_path: Path) -> None:
    special = AddedToken("<end>", special=True, normalized=True)
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    tokenizer = tiny.load(tmp_path, tiny.word_piece([special]), chat_template=template)
    (end,) = tokenizer.encode("<END>")
    assert tokenizer.encode_chat([{"role": "user", "content": "fox <END> <end> dog"}]).count(end) == 1


def test_where_the_chat_template_is_looked_for(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level(), {"chat_template": "from config"})
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(folder).render_chat(messages) == "from config"
    config = {
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "named"}]
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).render_chat(messages) == "named"
    (folder / "chat_template.jinja").write_text("from file")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "from file"
    assert Tokenizer.from_folder(folder, "given").render_chat(messages) == "given"
    with pytest.raises(UsageError):
        Tokenizer.from_folder(folder, "{% if %}")


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level())
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert caught.value.code == "no_chat_template"
    assert "--chat-template" in str(caught.value.hint)


def test_empty_messages_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny.load(tmp_path, tiny.byte_level(), chat_template=tiny.CHATML)
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        tokenizer.encode_chat([])


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b")
    with pytest.raises(ModelNotFoundError, match=r"only tokenizer\.model") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "convert" in str(caught.value.hint)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b'{"model": 3}', b"\xff\xfe", b'"x"'])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level())
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_bytes(whole)
    if content != b"{}":
        for name in ("tokenizer_config.json", "generation_config.json"):
            broken = dict.fromkeys((name,), content)
            for path, data in broken.items():
                (folder / path).write_bytes(b"null" if data == b'{"model": 3}' else data)
            with pytest.raises(CorruptFileError, match=name.replace(".", r"\.")):
                Tokenizer.from_folder(folder)
            (folder / name).unlink()


def test_tokens_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    size = backend.get_vocab_size()
    listed = {
        str(size): {"content": "<new>", "special": True},
        str(size + 1): {"content": "<plain>", "special": False},
        str(size + 7): {"content": "<elsewhere>", "special": True},
    }
    tokenizer = tiny.load(tmp_path, backend, added_tokens_decoder=listed)
    assert tokenizer.encode("<new><plain>").tolist() == [size, size + 1]
    assert tokenizer.is_special(size)
    assert not tokenizer.is_special(size + 1)
    assert len(tokenizer.encode("<elsewhere>")) > 1
