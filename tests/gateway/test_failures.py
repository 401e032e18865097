"""A replica that dies, lies, is absent or refuses: every request gets a reply, and service resumes."""

from __future__ import annotations

import openai
import pytest

from headrace.core.messages import Failed
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, Stack, call, chat, open_request

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("trouble", ["die_after", "garbage_after"])
def test_death_in_the_middle_of_a_stream(stack, trouble):
    stack.answer("one two three four five six", **{trouble: 2})
    events = chat(stack, stream=True).events
    assert "error" in events[-1], "an event says so, not a bare close"
    assert events[-1]["error"]["type"] == "service_unavailable"
    assert "[DONE]" not in events
    assert len(events) > 1
    _service_resumes(stack)


@pytest.mark.parametrize("trouble", ["die_after", "garbage_after"])
def test_death_before_a_whole_answer(stack, trouble):
    stack.answer("one two three four five six", **{trouble: 2})
    answer = chat(stack)
    assert answer.status == 503
    assert answer.error["type"] == "service_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    _service_resumes(stack)


def test_the_official_client_raises_on_an_error_in_the_stream(stack):
    stack.answer("one two three four five six", die_after=2)
    with (
        openai.OpenAI(base_url=stack.api, api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError, match="went away"),
    ):
        for _ in client.chat.completions.create(model="tiny", messages=HI, stream=True):
            pass
    _service_resumes(stack)


def _service_resumes(stack: Stack) -> None:
    stack.wait_for(lambda: stack.client.alive, "connected again")
    stack.answer("fine")
    assert chat(stack).json["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize(
    ("failed", "status", "kind"),
    [
        (Failed("", 500, "server_error", "out of luck", code="engine_error"), 500, "server_error"),
        (Failed("", 400, "invalid_request_error", "no", "top_k"), 400, "invalid_request_error"),
        (Failed("", 503, "service_unavailable", "draining"), 503, "service_unavailable"),
        (Failed("", 429, "rate_limit_error", "full"), 429, "rate_limit_error"),
    ],
)
def test_the_engines_refusal_reaches_the_caller(stack, failed, status, kind):
    stack.plan(lambda request: Plan(failure=failed))
    answer = chat(stack)
    assert answer.status == status
    assert answer.error["type"] == kind
    assert failed.message in answer.error["message"]
    assert answer.error["param"] == failed.param
    streamed = chat(stack, stream=True).events
    assert streamed[-1]["error"]["type"] == kind


def test_one_failed_prompt_aborts_its_siblings(stack):
    def plan(request):
        if request.request_id.endswith("-1"):
            return Plan(failure=Failed("", 500, "server_error", "no"))
        return Plan(silent=True)

    stack.plan(plan)
    answer = call(stack, "/v1/completions", {"prompt": ["one", "two", "three"]})
    assert answer.status == 500
    stack.wait_for(lambda: not stack.replica.running, "siblings aborted")


def test_without_a_replica(tokenizer, tmp_path):
    with Stack(tokenizer, tmp_path, with_replica=False) as stack:
        for answer in (chat(stack), chat(stack, stream=True), call(stack, "/ready")):
            assert answer.status == 503
            assert answer.error["type"] == "service_unavailable"
            assert int(answer.headers["retry-after"]) >= 1
        assert call(stack, "/health").status == 200
        assert call(stack, "/v1/models").json["data"][0]["id"] == "tiny"
        stack.run(stack.replica.start())
        stack.wait_for(lambda: stack.client.alive, "connected")
        assert call(stack, "/ready").status == 200
        stack.answer("fine")
        assert chat(stack).status == 200


def test_a_replica_that_never_greets_is_not_ready(tokenizer, tmp_path):
    with Stack(tokenizer, tmp_path, greets=False) as stack:
        stack.wait_for(lambda: stack.replica.num_connections, "connected")
        assert call(stack, "/ready").status == 503
        assert chat(stack).status == 503


def test_our_own_mistake_is_a_500_and_the_server_goes_on(stack, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("secret prompt text")

    monkeypatch.setattr(stack.tokenizer, "encode_chat", broken)
    answer = chat(stack)
    monkeypatch.undo()
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"
    assert answer.headers["x-request-id"] in answer.error["message"]
    assert "secret" not in answer.body.decode()
    assert chat(stack).status == 200


def test_requests_run_together_and_one_death_ends_each_once(stack):
    stack.answer("one two three ", endless=True)
    socks = [open_request(stack, CHAT, {"messages": HI, "stream": True}) for _ in range(8)]
    stack.wait_for(lambda: sum(running.sent > 3 for running in stack.replica.running.values()) == 8)
    stack.loop.call_soon_threadsafe(stack.replica.die)
    for sock in socks:
        received = b""
        while part := sock.recv(65536):
            received += part
            if received.endswith(b"0\r\n\r\n"):
                break
        assert received.count(b'data: {"error"') == 1
        sock.close()
    _service_resumes(stack)
