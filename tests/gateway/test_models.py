"""Several models behind one gateway; tiers and sessions on their way to the engine."""

from __future__ import annotations

import pytest

from tests.gateway.tiny import CHAT, Stack, call, chat, complete

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def two(tokenizer, tmp_path_factory):
    models = {"large-model": ("large", "best"), "small-model": ("small",)}
    with Stack(tokenizer, tmp_path_factory.mktemp("two"), models=models) as stack:
        stack.answer("fine")
        yield stack


@pytest.mark.parametrize(
    ("asked", "reported", "served_by"),
    [("large", "large", 0), ("best", "best", 0), ("small", "small", 1), (None, "large", 0)],
)
@pytest.mark.parametrize("ask", [chat, complete])
def test_a_body_goes_to_the_model_it_names(two, ask, asked, reported, served_by):
    for replica in two.replicas:
        replica.requests.clear()
    answer = ask(two, **({} if asked is None else {"model": asked}))
    assert answer.json["model"] == reported
    assert [len(replica.requests) for replica in two.replicas] == [served_by == 0, served_by == 1]
    assert two.replicas[served_by].requests[0].model == ("large-model", "small-model")[served_by]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
def test_an_unknown_model_is_told_what_is_served(two, path):
    answer = call(two, path, {"model": "huge", "messages": HI, "prompt": "x"})
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    for name in ("large", "best", "small"):
        assert name in answer.error["message"]


@pytest.mark.parametrize("body", [b'{"model": 5}', b'{"model": ', b"[]"])
def test_a_body_whose_model_cannot_be_read(two, body):
    assert call(two, CHAT, body).status == 400


def test_a_long_body_goes_to_its_model_too(two):
    body = {"messages": HI, "padding": "x" * 200_000}
    assert call(two, CHAT, {**body, "model": "small"}).json["model"] == "small"
    assert call(two, CHAT, {**body, "model": "huge"}).status == 404


def test_metrics_are_told_apart_by_model(two):
    chat(two, model="small")
    page = call(two, "/metrics").body.decode()
    for name in ("large", "small"):
        assert f'headrace_time_to_first_token_seconds_count{{model_name="{name}"}}' in page
    assert 'headrace_replica_up{model_name="small",replica="fake-1"} 1.0' in page


def test_tiers(stack):
    for asked, tier, reported in (
        ("auto", "standard", "default"),
        ("default", "standard", "default"),
        ("flex", "flex", "flex"),
        ("priority", "priority", "priority"),
    ):
        answer = chat(stack, service_tier=asked)
        assert stack.replica.requests[-1].tier == tier
        assert answer.json["service_tier"] == reported
        events = chat(stack, service_tier=asked, stream=True).events
        assert {event["service_tier"] for event in events[:-1]} == {reported}
    assert "service_tier" not in chat(stack).json
    assert stack.replica.requests[-1].tier == "standard"
    refused = chat(stack, service_tier="express")
    assert refused.status == 400 and refused.error["param"] == "service_tier"


def test_sessions(stack):
    body = {"messages": HI, "prompt_cache_key": "key", "user": "ann"}
    for fields, headers, session in (
        (body, {"x-session-id": "s1"}, "s1"),
        (body, {}, "key"),
        ({"messages": HI, "user": "ann"}, {}, "ann"),
        ({"messages": HI}, {}, None),
    ):
        answer = call(stack, CHAT, fields, headers=headers)
        assert answer.status == 200
        assert answer.headers["x-headrace-ignored-fields"] is None
        assert stack.replica.requests[-1].session == session
