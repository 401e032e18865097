"""/v1/completions."""

from __future__ import annotations

import threading

import openai
import pytest

from headrace.core.request import pack_tokens
from headrace.gateway import chat as chat_module
from headrace.gateway import completions as completions_module
from headrace.gateway.logprobs import prompt_logprobs
from tests.gateway.tiny import Stack, call, complete

PARIS = "The capital of France is Paris."


@pytest.fixture
def client(stack: Stack):
    with openai.OpenAI(base_url=stack.api, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_text(stack, client):
    answer = client.completions.create(model="tiny", prompt="hello world")
    assert answer.choices[0].text == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert stack.replica.requests[0].prompt == stack.tokenizer.encode("hello world").tobytes()
    assert stack.replica.requests[0].sampling.max_tokens == 16


def test_streaming(stack, client):
    chunks = list(
        client.completions.create(
            model="tiny", prompt="hello", stream=True, max_tokens=3, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "The capital of"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_token_ids(stack, prompt, expected):
    assert complete(stack, prompt=prompt).status == 200
    assert [request.prompt for request in stack.replica.requests] == [pack_tokens(ids) for ids in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_keep_their_order(stack, stream):
    from tests.gateway.fake_replica import Plan

    def echo(request):
        return Plan(tokens=request.token_ids().tolist())

    stack.plan(echo)
    answer = complete(stack, prompt=["one", "two three"], n=2, stream=stream)
    texts = ["", "", "", ""]
    if stream:
        for event in answer.events[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        for choice in answer.json["choices"]:
            texts[choice["index"]] = choice["text"]
        assert answer.json["usage"]["prompt_tokens"] == sum(
            r.num_prompt_tokens for r in stack.replica.requests
        )
    assert texts == ["one", "one", "two three", "two three"]
    assert len({request.sampling.seed for request in stack.replica.requests}) == 2


def test_logprobs_and_echo(stack):
    answer = complete(stack, prompt="hello world", logprobs=2, echo=True, max_tokens=2).json["choices"][0]
    assert answer["text"] == "hello worldThe capital"
    logprobs = answer["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert answer["text"][offset:].startswith(token)


def test_echo_alone_scores_a_prompt(stack):
    answer = complete(stack, prompt="hello world", logprobs=1, echo=True, max_tokens=0).json
    assert answer["choices"][0]["text"] == "hello world"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_streams_the_prompt_first(stack):
    events = complete(stack, prompt="hello", echo=True, max_tokens=2, stream=True).events
    assert events[0]["choices"][0]["text"] == "hello"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "helloThe capital"


def test_prompt_logprobs(stack):
    choice = complete(stack, prompt="hello world", prompt_logprobs=1, max_tokens=1).json["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == stack.replica.requests[0].num_prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["one", 5]}, "prompt"),
        ({"prompt": [[1], "one"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"prompt": [5] * 500, "max_tokens": 20}, "max_tokens"),
    ],
)
def test_wrong_requests(stack, fields, param):
    answer = complete(stack, **fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert stack.replica.requests == []


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"suffix": None}, {"best_of": 1}, {"best_of": 2, "n": 2}])
def test_values_that_mean_off(stack, fields):
    assert complete(stack, **fields).status == 200


@pytest.mark.parametrize(("length", "where"), [(20, "stack"), (300, "headrace-text")])
def test_large_prompt_logprobs_are_written_off_the_loop(stack, monkeypatch, length, where):
    threads = []

    def recorded(*arguments):
        threads.append(threading.current_thread().name)
        return prompt_logprobs(*arguments)

    for module in (completions_module, chat_module):
        monkeypatch.setattr(module, "prompt_logprobs", recorded)
    prompt = [7] * length
    choice = complete(stack, prompt=prompt, prompt_logprobs=20, max_tokens=2).json["choices"][0]
    assert len(choice["prompt_logprobs"]) == length
    answer = call(
        stack,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "~" * length}], "prompt_logprobs": 20, "max_tokens": 2},
    )
    assert len(answer.json["prompt_logprobs"]) > length
    assert len(threads) == 2 and all(name.startswith(where) for name in threads)
