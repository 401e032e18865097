"""Chat templates: as Transformers renders them, guarded against special-token text, bounded when hostile."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.core.errors import CorruptFileError, HeadraceError, InvalidRequestError, UsageError
from headrace.text.inline import InlineTemplate, OverBudget
from headrace.text.template import ChatTemplate
from tests.text.conversations import GEMMA_TEMPLATE
from tests.text.tiny import CHATML

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
LLAMA_LIKE = """{%- if tools is not none and tools %}{{- 'Tools: ' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- set ns = namespace(count=0, last='') %}
{%- for m in messages[::-1] %}{%- if m.role == 'user' %}
{%- set ns.count = ns.count + 1 %}{%- set ns.last = m.content | trim %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.count }}
{%- for m in messages if m.content is string %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- if '</think>' in m.content %}{%- set text = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- else %}{%- set text = m['content'] %}{%- endif %}
{{- m.role ~ ': ' ~ text ~ '\\n' }}
{%- if loop.last %}{% break %}{%- endif %}
{%- endfor %}{% generation %}{{- ns.last }}{% endgeneration %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}
{%- endif %}"""
MACRO = (
    "{% macro show(m) %}{{ m.role }}={{ m.content }};{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}"
)


def chat_template(source: str, *, timeout: float = 30.0, given: bool = False) -> ChatTemplate:
    return ChatTemplate(
        source,
        variables={"bos_token": "<s>", "eos_token": "</s>"},
        specials=SPECIALS,
        origin="chat_template.jinja",
        timeout=timeout,
        given=given,
    )


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = chat_template(source)
    try:
        return template.render(messages, **options)[0]
    finally:
        template.close()


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    options.setdefault("add_generation_prompt", True)
    rendered, _ = render_jinja_template(
        [messages], chat_template=source, bos_token="<s>", eos_token="</s>", **options
    )
    return str(rendered[0])


@pytest.mark.parametrize(
    "source", [CHATML, GEMMA_TEMPLATE, LLAMA_LIKE, MACRO], ids=["chatml", "gemma", "llama", "macro"]
)
def test_renders_as_transformers_does(source: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": ["<b>", 'é"', 1.5, None]}}}]
    for messages in (
        CHAT[:1],
        CHAT,
        [
            {"role": "user", "content": "  a < b  "},
            {"role": "assistant", "content": "<think>x</think>\n\nyes"},
        ],
        [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "\n"},
            {"role": "user", "content": "字🙂"},
        ],
    ):
        options: dict[str, Any]
        for options in (
            {},
            {"tools": tools},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
        ):
            if options.get("continue_final_message"):
                options = {**options, "add_generation_prompt": False}
                if source == LLAMA_LIKE:
                    continue  # it shows the last message twice, and Transformers leaves its mark in
            assert render(source, messages, **options) == by_transformers(source, messages, **options), (
                options
            )


def test_plain_templates_render_inline_and_others_in_a_child() -> None:
    for source, inline in ((CHATML, True), (GEMMA_TEMPLATE, True), (LLAMA_LIKE, True), (MACRO, False)):
        template = chat_template(source)
        assert template.renders_inline == inline
        template.close()


def test_inline_and_child_give_the_same_text() -> None:
    tools = [{"name": "f", "schema": {"deep": [[[1, 2], {"x": "y"}]]}}]
    for source in (CHATML, LLAMA_LIKE):
        inline, child = chat_template(source), chat_template(source)
        child._inline = None
        for text in ("x", "é字🙂\x00", "<|im_end|>", "\ud83d"[:0]):
            messages = [{"role": "user", "content": text}]
            assert inline.render(messages, tools) == child.render(messages, tools)
        child.close()


def test_arbitrary_variables_reach_the_template() -> None:
    source = "{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}{{ documents }}"
    assert render(source, CHAT) == "offNone"
    assert render(source, CHAT, template_kwargs={"enable_thinking": True}) == "onNone"


def test_null_fields_are_left_out_and_parts_joined_unless_read() -> None:
    assert (
        render("{{ messages[0].name is defined }}", [{"role": "user", "content": "x", "name": None}])
        == "False"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    reads = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert render(reads, parts) == "[a][b]"
    with pytest.raises(InvalidRequestError, match="image_url"):
        render("{{ messages[0].content }}", [{"role": "user", "content": [{"type": "image_url"}]}])


def test_special_text_in_strings_is_marked_and_only_there() -> None:
    template = chat_template(
        "<s>{% for m in messages %}{{ m.role }}:{{ m | tojson }}{{ m.content }}</s>{% endfor %}"
    )
    assert template.render(CHAT)[1] is None
    text, guard = template.render(
        [{"role": "user", "content": "a </s> b <|im_<s>end|> <|im_end|", "<s>": "x"}]
    )
    assert guard is not None
    assert text.startswith("<s>user:")
    assert text.endswith("</s>")
    inside = text.removeprefix("<s>").removesuffix("</s>")
    assert not any(special in inside for special in SPECIALS)
    assert "a </s> b <|im_<s>end|> <|im_end|" in text.replace(guard, "")


def test_special_text_cannot_be_put_together_from_pieces() -> None:
    template = chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    pieces = [{"role": "user", "content": piece} for piece in ("<|im_", "end", "|>", "<", "s>")]
    text, guard = template.render(pieces)
    assert guard is not None
    assert "<|im_end|>" not in text
    assert "<s>" not in text
    assert text.replace(guard, "") == "<|im_end|><s>"


def test_a_guard_that_json_escaped_is_found_again() -> None:
    template = chat_template("{{ messages[0].content | tojson(ensure_ascii=true) }}")
    text, guard = template.render([{"role": "user", "content": "\ue000 <s>"}])
    assert guard == "\ue001"
    assert text == f'"\\ue000 <{guard}s>"'


def test_continuing_the_final_message() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(CHATML, messages, **options).endswith("<|im_start|>assistant\none, two ")
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(trimming, messages, **options) == "[Count][one, two"
    twice = "{{ messages[-1].content }}|{{ messages[-1].content }}"
    assert render(twice, messages, **options) == "one, two |one, two "
    with pytest.raises(InvalidRequestError, match="cannot both be true"):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        render("nothing", messages, **options)


def test_the_templates_own_complaint_reaches_the_caller() -> None:
    for prefix in ("", "{% macro f() %}{% endmacro %}"):
        with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
            render(prefix + "{{ raise_exception('roles must alternate') }}", CHAT)
        assert caught.value.code is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.more }}",
        "{{ messages + 1 }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{% endmacro %}{{ f.__globals__.x }}",
        "{% include 'x' %}",
        "{{ namespace(__init__=1) }}",
        "{% for m in messages %}{{ cycler.__init__.__globals__.os.popen('id').read() }}{% endfor %}",
    ],
)
def test_a_failing_template_is_a_typed_error(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, CHAT)
    assert caught.value.code == "chat_template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x | no_such_filter }}",
        "{% endfor %}",
        "{{ 'a",
        "{% macro f() %}{{ x | nope }}{% endmacro %}",
    ],
)
def test_a_broken_template_is_refused_at_the_start(source: str) -> None:
    with pytest.raises(CorruptFileError, match=r"chat_template\.jinja"):
        chat_template(source)
    with pytest.raises(UsageError, match="not valid"):
        chat_template(source, given=True)


HOSTILE = {
    "nested ranges": "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
    "{% endfor %}"
    "{% endfor %}{% endfor %}",
    "repetition": "{% set x = 'a' * 10**10 %}{{ x }}",
    "repetition of input": "{{ messages[0].content * 10000000000 }}",
    "padding": "{{ 'x' | center(10**10) }}",
    "formatting": "{{ '%10000000000d' % 1 }}",
    "format method": "{{ '{:>10000000000}'.format(messages[0].content) }}",
    "method padding": "{{ messages[0].content.ljust(10**10) }}",
    "macros that call themselves": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching macros": "{% macro f(n) %}"
    "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "doubling": "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for a in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "doubling inline": "{% set ns = namespace(x='a') %}"
    + "{% set ns.x = ns.x + ns.x %}" * 64
    + "{{ ns.x | length }}",
    "doubling a list": "{% set ns = namespace(x=[1]) %}"
    + "{% set ns.x = ns.x + ns.x %}" * 64
    + "{{ ns.x | length }}",
    "doubling with ~": "{% set ns = namespace(x='a') %}" + "{% set ns.x = ns.x ~ ns.x %}" * 64 + "{{ ns.x }}",
    "big power": "{{ 3 ** (10 ** 9) }}",
    "replacing": "{% set a = 'a' * 100000 %}"
    "{{ a | replace('a', a) | replace('a', a) | replace('a', a) | length }}",
    "lorem": "{{ lipsum(n=100000000) }}",
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_templates_end_in_a_typed_error(name: str) -> None:
    """Each is cut off by its budget, by time or by memory; with a fresh request served right after."""
    source = HOSTILE[name]
    gate = "{% if messages[0].content == 'go' %}"
    template = None
    try:
        template = chat_template(gate + source + "{% endif %}fine", timeout=1.5)
        with pytest.raises(InvalidRequestError) as caught:
            template.render([{"role": "user", "content": "go"}])
        assert caught.value.code in ("chat_template_timeout", "chat_template_error")
        assert template.render(CHAT)[0] == "fine"
    except CorruptFileError:
        pass  # so much is computed while compiling that it was refused at the start
    finally:
        if template is not None:
            template.close()


def test_a_request_made_to_be_slow_is_not_rendered_here() -> None:
    nested = "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}"
    template = InlineTemplate(nested)
    messages = [{"role": "user", "content": "x"}] * 3000
    with pytest.raises(OverBudget):
        template.render({"messages": messages}, 3000)
    assert template.render({"messages": messages[:3]}, 3) == "x" * 9
    for source in (
        "{% for a in messages %}{{ messages[0].content }}{% endfor %}",
        "{% for a in messages %}{% if 'y' in messages[0].content %}{% endif %}{% endfor %}",
        "{% set x = messages[0].content %}{% for a in messages %}{% if 'y' in x %}{% endif %}{% endfor %}",
        "{% set x = messages[0].content %}{% for a in messages %}{{ x }}{% endfor %}",
        "{% set x = messages[0].content %}"
        "{% for a in messages %}{% if x.split('y') %}{% endif %}{% endfor %}",
        "{% for a in messages %}{% set y = messages | tojson %}{% endfor %}",
        "{% for a in messages %}{% if messages == messages %}{% endif %}{% endfor %}",
        "{% for a in messages %}{% set y = messages ~ '' %}{% endfor %}",
    ):
        big = [{"role": "user", "content": "x" * 2_000}] * 2_000
        with pytest.raises(OverBudget):
            InlineTemplate(source).render({"messages": big}, 2_000)


def test_deep_indented_json_is_not_written_here() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep, *range(40)]
    with pytest.raises(OverBudget):
        InlineTemplate("{{ tools | tojson(indent=16) }}").render({"tools": deep}, 24_000)


def test_a_killed_child_is_replaced() -> None:
    template = chat_template(MACRO)
    assert template.render(CHAT)[0] == "user=Hello;assistant=Hi!;"
    child = template._process._child
    assert child is not None
    os.kill(child.pid, 9)
    child.wait()
    assert template.render(CHAT)[0] == "user=Hello;assistant=Hi!;"
    template.close()


def test_the_child_knows_no_secrets_and_ends_with_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    template = chat_template(MACRO)
    child = template._process._child
    assert child is not None
    assert child.stdin is not None
    with open(f"/proc/{child.pid}/environ", "rb") as environment:
        assert b"secret" not in environment.read()
    child.stdin.close()
    assert child.wait(timeout=30) == 0
    template.close()


def test_threads_share_one_child() -> None:
    template = chat_template(MACRO)
    before = threading.active_count()
    with ThreadPoolExecutor(4) as pool:
        chats = [[{"role": "user", "content": f"{i}" * 2000}] for i in range(60)]
        texts = [text for text, _ in pool.map(template.render, chats)]
    assert texts == [f"user={f'{i}' * 2000};" for i in range(60)]
    assert threading.active_count() <= before
    template.close()


def test_large_chats_pass_through_the_child() -> None:
    template = chat_template(MACRO)
    text = "字" * 700_000
    assert template.render([{"role": "user", "content": text}])[0] == f"user={text};"
    template.close()


@pytest.mark.parametrize("messages", [["text"], [1], [None], [[]]])
def test_messages_must_be_objects(messages: list[Any]) -> None:
    with pytest.raises(HeadraceError, match="must be an object"):
        render(CHATML, messages)
