"""A replica that dies, lies, is absent or refuses: requests go on elsewhere, or get a reply that says so."""

from __future__ import annotations

import openai
import pytest

from headrace.core.knobs import RouterConfig
from headrace.core.messages import Failed
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, Stack, call, chat, complete, open_request

HI = [{"role": "user", "content": "hi"}]
PARIS = "The capital of France is Paris."


@pytest.fixture
def fragile(tokenizer, tmp_path):
    """A gateway that moves no request: what a replica does to it is what its caller gets."""
    with Stack(tokenizer, tmp_path, router=RouterConfig(max_rescues=0)) as stack:
        yield stack


@pytest.fixture
def pair(tokenizer, tmp_path):
    """Two replicas, of which ``dying`` will lose its first request."""
    with Stack(tokenizer, tmp_path, num_replicas=2) as stack:
        stack.answer(PARIS)
        yield stack


def break_once(stack: Stack, text: str = PARIS, **trouble) -> None:
    """From now on the first replica that gets a request dies of it; the other answers."""
    tokens = stack.tokenizer.encode(text, False).tolist()
    broken = []

    def plan(request):
        if not broken:
            broken.append(request.request_id)
            return Plan(tokens=tokens, **trouble)
        return Plan(tokens=tokens)

    stack.plan(plan)


def received(stack: Stack) -> list:
    return [request for replica in stack.replicas for request in replica.requests]


@pytest.mark.parametrize("trouble", ["die_after", "garbage_after"])
def test_death_in_the_middle_of_a_stream(fragile, trouble):
    stack = fragile
    stack.answer("one two three four five six", **{trouble: 2})
    events = chat(stack, stream=True).events
    assert "error" in events[-1], "an event says so, not a bare close"
    assert events[-1]["error"]["type"] == "service_unavailable"
    assert "[DONE]" not in events
    assert len(events) > 1
    _service_resumes(stack)


@pytest.mark.parametrize("trouble", ["die_after", "garbage_after"])
def test_death_before_a_whole_answer(fragile, trouble):
    stack = fragile
    stack.answer("one two three four five six", **{trouble: 2})
    answer = chat(stack)
    assert answer.status == 503
    assert answer.error["type"] == "service_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    _service_resumes(stack)


def test_the_official_client_raises_on_an_error_in_the_stream(fragile):
    stack = fragile
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
def test_the_engines_refusal_reaches_the_caller(fragile, failed, status, kind):
    stack = fragile
    stack.plan(lambda request: Plan(failure=failed))
    answer = chat(stack)
    assert answer.status == status
    assert answer.error["type"] == kind
    assert failed.message in answer.error["message"]
    assert answer.error["param"] == failed.param
    streamed = chat(stack, stream=True).events
    assert streamed[-1]["error"]["type"] == kind


def test_one_failed_prompt_aborts_its_siblings(fragile):
    stack = fragile

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


def test_requests_run_together_and_one_death_ends_each_once(fragile):
    stack = fragile
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


@pytest.mark.parametrize("trouble", [{"die_after": 0}, {"die_after": 3}, {"garbage_after": 3}])
@pytest.mark.parametrize("stream", [False, True])
def test_another_replica_goes_on_and_nobody_notices(pair, trouble, stream):
    break_once(pair, **trouble)
    answer = chat(pair, stream=stream, stream_options={"include_usage": True} if stream else None)
    if stream:
        assert answer.events[-1] == "[DONE]"
        text = "".join(event["choices"][0]["delta"]["content"] for event in answer.events[:-2])
        usage = answer.events[-2]["usage"]
    else:
        text = answer.json["choices"][0]["message"]["content"]
        usage = answer.json["usage"]
    assert text == PARIS
    first, second = received(pair)
    assert second.request_id == f"{first.request_id}-r1"
    assert usage["prompt_tokens"] == first.num_prompt_tokens
    assert usage["completion_tokens"] == len(pair.tokenizer.encode(PARIS, False)) + 1
    assert b'headrace_request_rescues_total{model_name="tiny"} 1.0' in call(pair, "/metrics").body


def test_a_stop_string_is_found_across_a_rescue(pair):
    break_once(pair, die_after=4)
    answer = chat(pair, stop=["ance is"], stream=True)
    text = "".join(event["choices"][0]["delta"]["content"] for event in answer.events[:-1])
    assert text == "The capital of Fr"
    assert answer.events[-2]["choices"][0]["stop_reason"] == "ance is"
    pair.wait_for(lambda: not any(replica.running for replica in pair.replicas), "aborted in the engine")


def test_samples_and_log_probabilities_survive_a_rescue(pair):
    break_once(pair, die_after=3)
    choices = chat(pair, n=3, logprobs=True, top_logprobs=1).json["choices"]
    assert [choice["message"]["content"] for choice in choices] == [PARIS] * 3
    for choice in choices:
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == PARIS
    assert sorted(request.sample_index for request in received(pair)[-3:]) == [0, 1, 2]


def test_prompts_of_one_body_are_rescued_each(pair):
    pair.answer(PARIS)
    prompts = ["one", "two", "three", "four"]
    pair.replicas[0].plan = lambda request: Plan(die_after=0)
    answer = complete(pair, prompt=prompts, max_tokens=50)
    assert [choice["text"] for choice in answer.json["choices"]] == [PARIS] * len(prompts)


def test_a_full_fleet_says_so_after_the_wait(tokenizer, tmp_path):
    router = RouterConfig(queue_timeout_s=0.2)
    with Stack(tokenizer, tmp_path, router=router, max_num_seqs=1) as stack:
        stack.plan(lambda request: Plan(silent=True))
        held = [open_request(stack, CHAT, {"messages": HI, "stream": True}) for _ in range(40)]
        stack.wait_for(lambda: stack.dispatcher.num_open == 40, "more than fit")
        refused = chat(stack, stream=True)
        assert refused.status == 429, "before the first byte an error has its status, also in a stream"
        assert refused.error["type"] == "rate_limit_error"
        for sock in held:
            sock.close()
        stack.wait_for(lambda: not stack.replica.running and not stack.dispatcher.num_open, "aborted")


def test_a_stream_that_waits_for_a_place_begins_when_it_has_one(tokenizer, tmp_path):
    with Stack(tokenizer, tmp_path, max_num_seqs=1) as stack:
        stack.plan(lambda request: Plan(silent=True))
        held = [open_request(stack, CHAT, {"messages": HI, "stream": True}) for _ in range(40)]
        stack.wait_for(lambda: stack.dispatcher.num_open == 40, "more than fit")
        with open_request(stack, CHAT, {"messages": HI, "stream": True}) as late:
            stack.wait_for(lambda: stack.dispatcher.num_open == 41, "it waits")
            late.settimeout(0.05)
            with pytest.raises(TimeoutError):
                late.recv(1)
            for sock in held:
                sock.close()
            late.settimeout(20)
            begun = b""
            while b'"role":"assistant"' not in begun:
                part = late.recv(65536)
                assert part, begun
                begun += part
            assert begun.startswith(b"HTTP/1.1 200"), "it begins before there is any token"
        stack.wait_for(lambda: not stack.dispatcher.num_open, "aborted")
