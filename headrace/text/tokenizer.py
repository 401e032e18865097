"""One model's tokenizer and chat template, from its folder."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from headrace.core.errors import CorruptFileError, InvalidRequestError, ModelNotFoundError
from headrace.text.detokenizer import Detokenizer, make_detokenizer
from headrace.text.segments import SegmentCache, invalid_text
from headrace.text.template import ChatTemplate
from headrace.text.vocabulary import Vocabulary

_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.txt", "vocab.json", "tiktoken.model", "tekken.json")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class _Parts(msgspec.Struct):
    """What of tokenizer.json is looked at here; the vocabulary is skipped."""

    pre_tokenizer: Any = None
    decoder: Any = None


class Tokenizer:
    """Text to ids and back, and chats to ids. Thread-safe.

    ``encode`` and ``encode_chat`` return ``array('I')``, whose ``tobytes()`` is ``Request.prompt``. Short
    texts take well under a millisecond; for long ones, and where ``renders_inline`` is False, call from a
    worker thread: what is not cached is encoded with the interpreter free for others.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        parts: _Parts,
        config: Mapping[str, Any],
        eos_token_ids: Sequence[int],
        cache_bytes: int,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.named_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))}
        _add_missing(backend, config, list(self.named_tokens.values()))
        self._backend = backend
        self._vocabulary = Vocabulary(backend, parts.decoder)
        self.segments = SegmentCache(backend, parts.pre_tokenizer, capacity=cache_bytes)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *own)))
        self._frame = self._added_around(config)
        self._template: ChatTemplate | None = None

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        chat_template: str | None = None,
        *,
        cache_bytes: int = 64 << 20,
        template_timeout_s: float = 5.0,
    ) -> Tokenizer:
        """Reads tokenizer.json and the configuration files beside it.

        ``chat_template`` is a template's text that replaces the model's own; ``cache_bytes`` bounds the
        cache of encoded text. Raises ModelNotFoundError, CorruptFileError, or UsageError when
        ``chat_template`` is broken.
        """
        folder = Path(folder)
        data = _read_tokenizer(folder)
        path = folder / "tokenizer.json"
        try:
            parts = msgspec.json.decode(data, type=_Parts)
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the tokenizers package raises plain Exception
            raise CorruptFileError(
                f"{path} is not a tokenizer: {error}", hint="download the model again"
            ) from error
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        eos_ids = [eos] if isinstance(eos, int) else eos if isinstance(eos, list) else []
        tokenizer = cls(
            backend,
            parts=parts,
            config=config,
            eos_token_ids=[token_id for token_id in eos_ids if isinstance(token_id, int)],
            cache_bytes=cache_bytes,
        )
        source, origin = chat_template, "given"
        if source is None:
            source, origin = _own_template(folder, config)
        if source is not None:
            tokenizer._template = ChatTemplate(
                source,
                variables=tokenizer.named_tokens,
                specials=tokenizer.segments.specials,
                special_pattern=tokenizer.segments.special_pattern,
                origin=origin,
                timeout=template_timeout_s,
                given=chat_template is not None,
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included; a model's own vocabulary may be padded beyond."""
        return self._vocabulary.size

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def renders_inline(self) -> bool:
        """Whether chats are rendered in this process; if not, they wait for a child process."""
        return self._template is None or self._template.renders_inline

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Ids of a prompt, special tokens in it parsed; with those the model adds around a text."""
        ids = self.segments.encode(text)
        if not add_special_tokens:
            return ids
        if self._frame is None:
            try:
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=True)
            except (UnicodeError, TypeError) as error:
                raise invalid_text() from error
            return array("I", encoding.ids)
        before, after = self._frame
        return before + ids + after if before or after else ids

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> array[int]:
        """Ids of a conversation; special-token text in its strings stays text.

        Raises InvalidRequestError: the model has no chat template (code ``no_chat_template``), the template
        refuses the messages, fails on them (``chat_template_error``), or takes too long or too much memory
        (``chat_template_timeout``).
        """
        text, guard = self._render(
            messages, tools, add_generation_prompt, continue_final_message, template_kwargs
        )
        return self.segments.encode(text, guard)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text a conversation becomes, for people to look at."""
        text, guard = self._render(
            messages, tools, add_generation_prompt, continue_final_message, template_kwargs
        )
        return text if guard is None else text.replace(guard, "")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids the tokenizer does not know are left out."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special_tokens: bool = True, continuation: bool = False) -> Detokenizer:
        """Decodes ids that come a few at a time. ``continuation``: the text goes on from a prompt."""
        return make_detokenizer(
            self._vocabulary, skip_special_tokens=skip_special_tokens, continuation=continuation
        )

    def whole_text(self, token_id: int, skip_special_tokens: bool = True) -> str | None:
        """What an id adds to a text that is whole before it, None where that depends on its neighbours."""
        if skip_special_tokens and token_id in self._vocabulary.special_ids:
            return "" if self._vocabulary.exact else None
        return self._vocabulary.whole_text(token_id)

    def token_text(self, token_id: int) -> str:
        """A token's text, U+FFFD for parts of characters."""
        return self._vocabulary.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._vocabulary.special_ids

    def close(self) -> None:
        """Ends the chat template's child process, if there is one."""
        if self._template is not None:
            self._template.close()

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[str, str | None]:
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot be given messages",
                hint="start the server with --chat-template FILE, or use /v1/completions",
                code="no_chat_template",
            )
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        return self._template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            always_guard=self.segments.guards_always,
        )

    def _id_of(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _added_around(self, config: Mapping[str, Any]) -> tuple[array[int], array[int]] | None:
        """Ids put before and after a prompt; None when they depend on the text."""
        frames = set()
        for probe in ("a", "b c", "1"):
            plain = self._backend.encode(probe, add_special_tokens=False).ids
            full = self._backend.encode(probe, add_special_tokens=True).ids
            starts = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
            if len(starts) != 1:
                return None
            frames.add((tuple(full[: starts[0]]), tuple(full[starts[0] + len(plain) :])))
        if len(frames) != 1:
            return None
        before, after = frames.pop()
        # As Transformers does, the configuration's flags go before the tokenizer's own rule.
        if isinstance(flag := config.get("add_bos_token"), bool):
            before = (self.bos_token_id,) if flag and self.bos_token_id is not None else ()
        if isinstance(flag := config.get("add_eos_token"), bool):
            after = (self.eos_token_id,) if flag and self.eos_token_id is not None else ()
        return array("I", before), array("I", after)


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no model folder {folder}", hint="check the model's name or path")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        slow = [name for name in _SLOW_FILES if (folder / name).exists()]
        has = f"it has only {', '.join(slow)}" if slow else "it has no tokenizer files"
        raise ModelNotFoundError(
            f"{folder} has no tokenizer.json: {has}",
            hint="convert it once: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            if slow
            else "download the model again: the folder is incomplete",
        ) from None
    except OSError as error:
        raise CorruptFileError(f"cannot read {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeError) as error:
        raise CorruptFileError(
            f"{path} cannot be read as JSON: {error}", hint="download the model again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} holds no JSON object", hint="download the model again")
    return value


def _own_template(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The model's template and the file it is from: a file of its own goes before the configuration."""
    for path in (folder / "chat_template.jinja", folder / "chat_templates" / "default.jinja"):
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeError) as error:
            raise CorruptFileError(f"cannot read {path}: {error}", hint="download the model again") from error
    for path, templates in (
        (folder / "chat_template.json", _read_json(folder / "chat_template.json").get("chat_template")),
        (folder / "tokenizer_config.json", config.get("chat_template")),
    ):
        if isinstance(templates, list):
            named = {item.get("name"): item.get("template") for item in templates if isinstance(item, dict)}
            templates = named.get("default")
        if isinstance(templates, str):
            return templates, f"in {path}"
    return None, ""


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: list[str]) -> None:
    """Adds the tokens that the configuration names and tokenizer.json lacks, as Transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    items = listed.items() if isinstance(listed, dict) else ()
    entries = [(int(token_id), entry) for token_id, entry in items if str(token_id).isdecimal()]
    next_id = backend.get_vocab_size(with_added_tokens=True)
    missing = []
    for token_id, entry in sorted(entries, key=itemgetter(0)):
        content = _token_text(entry)
        if content is None or content in known or not isinstance(entry, dict):
            continue
        own = backend.token_to_id(content)
        if token_id != (next_id if own is None else own):
            continue  # the two files disagree; the tokenizer's own decides
        next_id += own is None
        flags = {name: bool(entry.get(name)) for name in _TOKEN_FLAGS}
        missing.append(tokenizers.AddedToken(content, **flags))
        known.add(content)
    for content in named:
        if content not in known and backend.token_to_id(content) is not None:
            missing.append(tokenizers.AddedToken(content, special=True, normalized=False))
            known.add(content)
    backend.add_tokens(missing)  # all at once: each call rebuilds the search
