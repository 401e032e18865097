"""Chat templates: from messages to the text a model was trained on, bounded in time and memory.

Special tokens come only from the template. Where a caller's string holds special-token text, a guard
character that occurs nowhere in the request is put inside it before rendering; the tokenizer takes it out
again and encodes that text as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from headrace.core.errors import CorruptFileError, InvalidRequestError, StartupError, UsageError
from headrace.text import jinja_env
from headrace.text.inline import InlineTemplate, OverBudget
from headrace.text.patterns import PrefixEnds, literal_pattern
from headrace.text.skeleton import Skeletons, copies_contents
from headrace.text.template_process import TemplateProcess, TemplateTimeout

_GUARDS = range(0xE000, 0xF8FF)
MAX_TEMPLATE_CHARACTERS = 1 << 20
_SHORT = 24
"""Characters up to which a string, such as a role or a field's name, is likely to come again."""


class ChatTemplate:
    """One template, ready to render. Thread-safe; ``render`` may block for up to ``timeout`` seconds.

    ``variables`` are always there (bos_token and the like); ``specials`` the texts of special tokens, and
    ``special_pattern`` finds them; ``origin`` is where the template comes from, for errors; ``given`` says
    that a user chose it. Raises UsageError (``given``) or CorruptFileError when it is not a template.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, Any],
        specials: list[str],
        special_pattern: re.Pattern[str] | None = None,
        origin: str,
        timeout: float,
        given: bool = False,
    ) -> None:
        self.source = source
        self._variables = dict(variables)
        # A mark goes inside a token, so a token of one character cannot be marked.
        markable = [text for text in specials if len(text) > 1]
        shared = special_pattern is not None and len(markable) == len(specials)
        self._special_pattern = special_pattern if shared else literal_pattern(markable)
        self._prefix_ends = PrefixEnds(markable)
        self._short_is_risky = lru_cache(maxsize=512)(self._is_risky)
        self._timeout = timeout
        self._inline: InlineTemplate | None = None
        self._skeletons: Skeletons | None = None
        self._process = TemplateProcess(source, timeout)  # starts when first needed
        failure: type[StartupError] = UsageError if given else CorruptFileError
        hint = "correct the file, or leave the flag out" if given else "give another one with --chat-template"
        try:
            if len(source) > MAX_TEMPLATE_CHARACTERS:
                raise jinja2.TemplateError(f"it has more than {MAX_TEMPLATE_CHARACTERS} characters")
            tree = jinja_env.ChatEnvironment().parse(source)
            self.takes_parts = _reads_parts(tree)
            try:
                self._inline = InlineTemplate(source)
                if copies_contents(tree, source):
                    self._skeletons = Skeletons()
            except OverBudget:
                status, message = self._process.start()
                if status != jinja_env.RENDERED:
                    raise jinja2.TemplateError(message) from None
        except TemplateTimeout:
            self.close()
            raise failure(
                f"chat template {origin} could not be prepared within {timeout:g} s and 1 GiB", hint=hint
            ) from None
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            self.close()
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise failure(f"chat template {origin}{line} is not valid: {error}", hint=hint) from error

    @property
    def renders_inline(self) -> bool:
        """Whether rendering happens in this process, and so takes no more than the text's size asks for."""
        return self._inline is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        always_guard: bool = False,
    ) -> tuple[str, str | None]:
        """The text, and the guard character if it holds one. Raises InvalidRequestError."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
                hint="set add_generation_prompt to false to continue the last message",
            )
        request = {
            "messages": [self._prepare(message) for message in messages],
            "tools": tools or None,
            "documents": None,
            **(template_kwargs or {}),
        }
        strings: list[str] = []
        _collect_strings(request, strings)
        guard = self._guard(strings, always_guard)
        if guard is not None:
            request = self._mark(request, guard)
        end = None
        if continue_final_message:
            end = _unused("".join(strings) + self.source + (guard or ""))
            _mark_end(request["messages"], end)
        text = None
        if self._skeletons is not None and not tools and not template_kwargs:
            text = self._skeletons.render(
                request["messages"],
                add_generation_prompt,
                lambda messages: self._render_whole({**request, "messages": messages}, add_generation_prompt),
            )
        if text is None:
            text = self._render_whole(request, add_generation_prompt)
        if guard is not None:
            # A template may have escaped it on the way into JSON.
            text = text.replace(f"\\u{ord(guard):04x}", guard)
        return (text if end is None else _cut_end(text, end)), guard

    def close(self) -> None:
        """Ends the child process, if there is one."""
        self._process.close()

    def _render_whole(self, request: Mapping[str, Any], add_generation_prompt: bool) -> str:
        strings: list[str] = []
        _collect_strings(request, strings)
        return self._run(
            {**self._variables, **request, "add_generation_prompt": add_generation_prompt},
            sum(map(len, strings)) + 16 * len(strings),
        )

    def _run(self, variables: dict[str, Any], num_characters: int) -> str:
        try:
            if self._inline is not None:
                try:
                    return self._inline.render(variables, num_characters)
                except OverBudget:
                    pass
            status, text = self._process.render(variables)
        except TemplateTimeout as error:
            raise InvalidRequestError(
                f"the chat template did not finish within {self._timeout:g} s and 1 GiB of memory",
                code="chat_template_timeout",
                hint="send less, or give a better template with --chat-template",
            ) from error
        except jinja_env.TemplateComplaint as complaint:
            status, text = jinja_env.COMPLAINT, str(complaint)
        except UnicodeError as error:
            status, text = jinja_env.FAILED, str(error)
        except Exception as error:  # whatever a template's code can raise, down to a TypeError
            status, text = jinja_env.FAILED, f"{type(error).__name__}: {error}"
        if status == jinja_env.RENDERED:
            return text
        if status == jinja_env.COMPLAINT:
            raise InvalidRequestError(f"the model's chat template says: {text}", param="messages")
        raise InvalidRequestError(
            f"the chat template failed on these messages: {text}",
            param="messages",
            code="chat_template_error",
            hint="check that the messages have the fields this model's template reads",
        )

    def _prepare(self, message: Any) -> dict[str, Any]:
        """A message as templates expect it: without null fields, and its text parts joined unless read."""
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"each message must be an object, got {type(message).__name__}", param="messages"
            )
        prepared = {name: value for name, value in message.items() if value is not None}
        content = prepared.get("content")
        if isinstance(content, list) and not self.takes_parts:
            prepared["content"] = "\n".join(map(_part_text, content))
        return prepared

    def _guard(self, strings: list[str], always: bool) -> str | None:
        pattern = self._special_pattern
        if pattern is None:
            return None
        if not always:
            for text in strings:
                risky = self._short_is_risky(text) if len(text) <= _SHORT else self._is_risky(text)
                if risky:
                    break
            else:
                return None
        return _unused("".join(strings) + self.source)

    def _is_risky(self, text: str) -> bool:
        """Whether a special token's text is in ``text``, or could be completed by what follows it."""
        pattern = self._special_pattern
        return pattern is not None and (bool(pattern.search(text)) or self._prefix_ends.length(text) > 0)

    def _mark(self, value: Any, guard: str) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, guard)
        if isinstance(value, Mapping):
            return {self._mark(name, guard): self._mark(item, guard) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(item, guard) for item in value]
        return value

    def _mark_text(self, text: str, guard: str) -> str:
        pattern = self._special_pattern
        assert pattern is not None
        # Again until none is left: one mark can uncover another token that shared characters with it.
        while pattern.search(text):
            text = pattern.sub(lambda match: match[0][0] + guard + match[0][1:], text)
        # A beginning of a special token at the end could be completed by what follows.
        return text + guard if self._prefix_ends.length(text) else text


def _collect_strings(value: Any, found: list[str]) -> None:
    """Adds every string in ``value``, names of fields included."""
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect_strings(item, found)
    elif value is not None and isinstance(value, (dict, Mapping)):
        for name, item in value.items():
            if isinstance(name, str):
                found.append(name)
            _collect_strings(item, found)


def _unused(text: str) -> str:
    """A private-use character that ``text`` holds neither as itself nor escaped."""
    escapes = text.lower() if "\\u" in text else ""
    for code in _GUARDS:
        if chr(code) not in text and f"\\u{code:04x}" not in escapes:
            return chr(code)
    raise InvalidRequestError("the messages use every private-use character", param="messages")


def _mark_end(messages: list[dict[str, Any]], end: str) -> None:
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        messages[-1] = {**last, "content": content + end + " "}
        return
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                marked = [*content[:index], {**part, "text": part["text"] + end + " "}, *content[index + 1 :]]
                messages[-1] = {**last, "content": marked}
                return
    raise InvalidRequestError(
        "continue_final_message needs a last message with text content", param="continue_final_message"
    )


def _cut_end(text: str, end: str) -> str:
    position = text.rfind(end)
    if position < 0:
        raise InvalidRequestError(
            "this model's chat template drops the end of the last message, so it cannot be continued",
            param="continue_final_message",
        )
    # A template that trims has taken the blank after the mark: trim what is before it likewise.
    kept = text[:position] if text[position + 1 : position + 2] == " " else text[:position].rstrip()
    return kept.replace(end + " ", "").replace(end, "")


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"content parts must be text for this model, got {kind!r}", param="messages")


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template goes through a message's content part by part."""
    holders = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, holders):
            holders.add(assign.target.name)
    return any(_is_content(loop.iter, holders) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, holders: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in holders
