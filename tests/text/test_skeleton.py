"""Skeletons: kept only of templates that copy contents, and then with the text of a full rendering."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequestError
from headrace.text.jinja_env import ChatEnvironment
from headrace.text.skeleton import MAX_KEPT, Skeletons, copies_contents
from headrace.text.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<s>system\n' }}"
    "{% endif %}{{'<s>' + message['role'] + '\n' + message['content'] + '</s>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
PICKY = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]"
    "{{ m.content ~ '|' }}{% endfor %}{{ messages | length }}{{ messages[-1].role }}"
)
COPYING = (CHATML, PICKY, "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endfor %}")
LOOKING = (
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{% if m.content %}{{ m.role }}{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content if loop.first else '' }}{% endfor %}",
    "{% for m in messages %}{% set text = m.content %}{{ text }}{% endfor %}",
    "{% for m in messages %}{% set other = m %}{{ other.content }}{% endfor %}",
    "{% for m in messages %}{{ m['con' + 'tent'] }}{% endfor %}",
    "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
    "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
    "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.content | length }}{% endfor %}",
    "{% for m in messages %}{{ loop.changed(m) }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.content %}{{ m.role }}{% endfor %}",
    "{% set messages = messages %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | tojson }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}",
    "{{ messages[0].content | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for m in m.content %}{{ m }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}\ufdd00\ufdd1{% endfor %}",
)
TEXT = st.text(st.sampled_from("ab \n<s>/\ufdd00\ufdd1\ue000{}|é"), max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}),
    min_size=1,
    max_size=5,
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(
        source, variables={"bos_token": "<s>"}, specials=["<s>", "</s>"], origin="test", timeout=5.0
    )


def rendered(one: ChatTemplate, *arguments: object, **options: object) -> object:
    try:
        return one.render(*arguments, **options)
    except InvalidRequestError as error:
        return error.message


@pytest.mark.parametrize("source", LOOKING)
def test_a_template_that_looks_at_contents_is_an_ordinary_one(source: str) -> None:
    assert not copies_contents(ChatEnvironment().parse(source), source)


@given(
    source=st.sampled_from(COPYING), turns=st.lists(MESSAGES, min_size=1, max_size=3), ending=st.booleans()
)
def test_the_text_is_that_of_a_full_rendering(source: str, turns: list, ending: bool) -> None:
    kept, whole = template(source), template(source)
    assert kept._skeletons is not None
    whole._skeletons = None
    for messages in [*turns, *turns]:
        for flags in (
            {"add_generation_prompt": ending},
            {"continue_final_message": True, "add_generation_prompt": False},
        ):
            assert rendered(kept, messages, **flags) == rendered(whole, messages, **flags)


def test_whatever_else_matters_is_rendered_whole() -> None:
    skeletons = Skeletons()

    def never(messages: list) -> str:
        raise AssertionError(messages)

    for message in (
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "user", "content": ["x"]},
        {"role": "us\ufdd00\ufdd1er", "content": "x"},
        {"role": "user"},
    ):
        assert skeletons.render([message], True, never) is None


def test_rendering_happens_once_for_the_same_roles_and_what_is_kept_is_bounded() -> None:
    skeletons = Skeletons()
    calls = []

    def render(messages: list) -> str:
        calls.append(len(messages))
        return "".join(message["role"] + message["content"] for message in messages)

    for text in ("x", "y"):
        assert skeletons.render([{"role": "user", "content": text}], True, render) == "user" + text
    assert calls == [1]
    for index in range(3 * MAX_KEPT):
        skeletons.render([{"role": f"r{index}", "content": ""}], False, render)
    assert len(skeletons._kept) <= MAX_KEPT
