"""/v1/chat/completions as the official client sees it."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, Stack, call, chat

HI = [{"role": "user", "content": "hi"}]
PARIS = "The capital of France is Paris."


@pytest.fixture
def client(stack: Stack):
    with openai.OpenAI(base_url=stack.api, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_answer_and_usage(stack, client):
    stack.replica.num_cached_tokens = 16
    answer = client.chat.completions.create(model="tiny", messages=HI, temperature=0)
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (request,) = stack.replica.requests
    assert answer.usage.prompt_tokens == request.num_prompt_tokens
    assert answer.usage.completion_tokens == len(stack.tokenizer.encode(PARIS, False)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_the_replica_gets_the_templates_tokens_and_their_identities(stack, client):
    from headrace.core.identity import block_identities

    messages = [
        {"role": "system", "content": "one two three"},
        {"role": "user", "content": "four five six " * 9},
    ]
    client.chat.completions.create(model="tiny", messages=messages)
    (request,) = stack.replica.requests
    expected = stack.tokenizer.encode_chat(messages)
    assert request.prompt == expected.tobytes()
    hello = stack.replica.hello
    assert request.block_ids == b"".join(block_identities(hello.root_identity, expected, hello.block_size))
    assert len(request.block_ids) == 32 * (len(expected) // hello.block_size) > 0
    assert request.sampling.seed is not None


def test_streaming(stack, client):
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 4, "tokens must not be held back to the end"


def test_streamed_usage_comes_before_done_and_is_null_elsewhere(stack):
    stack.replica.num_cached_tokens = 16
    events = chat(stack, stream=True, stream_options={"include_usage": True}).events
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    usage = events[-2]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["completion_tokens"] == len(stack.tokenizer.encode(PARIS, False)) + 1
    assert all(event["usage"] is None for event in events[:-2])
    plain = chat(stack, stream=True).events
    assert all("usage" not in event for event in plain[:-1])


def test_async_client(stack):
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=stack.api, api_key="none", timeout=20) as client:
            whole = await client.chat.completions.create(model="tiny", messages=HI)
            stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content or "", "".join(parts)

    assert asyncio.run(ask()) == (PARIS, PARIS)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length(stack, client, field):
    answer = client.chat.completions.create(model="tiny", messages=HI, **{field: 2})
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "The capital"
    assert answer.usage.completion_tokens == 2


def test_without_a_limit_the_context_is_the_limit(stack, client):
    client.chat.completions.create(model="tiny", messages=HI)
    assert stack.replica.requests[0].sampling.max_tokens is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_and_ends_the_engines_work(stack, stream):
    stack.answer(PARIS, endless=True)
    answer = chat(stack, stop=["is Pa"], stream=stream)
    if stream:
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
        last = answer.events[-2]["choices"][0]
    else:
        last = answer.json["choices"][0]
        text = last["message"]["content"]
    assert text == "The capital of France "
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] == "is Pa"
    stack.wait_for(lambda: not stack.replica.running, "request aborted in the engine")
    assert len(stack.replica.aborts) == 1


def test_overshoot_behind_a_stop_string_is_not_billed(stack):
    tokens = stack.tokenizer.encode(PARIS, False).tolist()
    stack.plan(lambda request: Plan(tokens=tokens, tokens_per_step=len(tokens)))
    answer = chat(stack, stop="France").json
    assert answer["choices"][0]["message"]["content"] == "The capital of "
    assert answer["usage"]["completion_tokens"] == len(stack.tokenizer.encode("The capital of France", False))


def test_stop_string_kept_on_request(stack):
    answer = chat(stack, stop="France", include_stop_str_in_output=True).json
    assert answer["choices"][0]["message"]["content"] == "The capital of France"


def test_stop_reason_names_the_callers_token_but_not_the_end_of_text(stack):
    plain = chat(stack).json["choices"][0]
    assert (plain["finish_reason"], plain["stop_reason"]) == ("stop", None)
    asked = chat(stack, stop_token_ids=[stack.replica.eos]).json["choices"][0]
    assert (asked["finish_reason"], asked["stop_reason"]) == ("stop", stack.replica.eos)


def test_several_choices(stack, client):
    answer = client.chat.completions.create(model="tiny", messages=HI, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {PARIS}
    assert answer.usage.completion_tokens == 3 * (len(stack.tokenizer.encode(PARIS, False)) + 1)
    texts = {0: "", 1: "", 2: ""}
    roles, reasons = [], []
    for chunk in client.chat.completions.create(model="tiny", messages=HI, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
        reasons += [choice.index] if choice.finish_reason else []
    assert texts == dict.fromkeys(range(3), PARIS)
    assert sorted(roles) == sorted(reasons) == [0, 1, 2]


def test_logprobs(stack, client):
    answer = client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2, max_tokens=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert [bytes(entry.bytes).decode() for entry in content] == ["The", " capital", " of"]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert content[0].top_logprobs[0].token == "The"
    assert content[0].logprob == -0.5
    streamed = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, max_tokens=3, stream=True
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == ["The", " capital", " of"]
    assert all(entry.top_logprobs == [] for entry in streamed)


def test_prompt_logprobs(stack):
    answer = chat(stack, prompt_logprobs=1, max_tokens=1).json
    (request,) = stack.replica.requests
    assert len(answer["prompt_logprobs"]) == request.num_prompt_tokens
    assert answer["prompt_logprobs"][0] is None
    second = request.token_ids()[1]
    assert answer["prompt_logprobs"][1] == {
        str(second): {"logprob": -0.5, "rank": 1, "decoded_token": stack.tokenizer.token_text(second)}
    }


def test_every_sampling_field_reaches_the_engine(stack):
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": 10, "6": -100},
        "seed": 42,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 1,
        "skip_special_tokens": False,
        "max_tokens": 5,
    }
    assert chat(stack, **fields).status == 200
    sampling = stack.replica.requests[0].sampling
    fields["logit_bias"] = {5: 10.0, 6: -100.0}
    assert {name: getattr(sampling, name) for name in fields} == fields


def test_null_means_left_out(stack):
    names = ["temperature", "top_p", "n", "max_tokens", "stop", "stream", "seed", "logit_bias", "logprobs",
             "stream_options", "top_k", "tools", "response_format", "user"]  # fmt: skip
    answer = chat(stack, **dict.fromkeys(names))
    assert answer.status == 200
    assert answer.headers["x-headrace-ignored-fields"] is None


def test_unknown_fields_inside_messages_and_stream_options_are_listed(stack):
    messages = [
        {"role": "user", "content": "hi", "mood": 1, "x y": 2},
        {"role": "user", "content": "", "mood": 3},
    ]
    body = {
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True, "pace": 1},
        "odd": 1,
    }
    answer = call(stack, CHAT, body)
    assert answer.status == 200
    listed = "messages[].mood,messages[].x?y,odd,stream_options.pace"
    assert answer.headers["x-headrace-ignored-fields"] == listed
    assert b'headrace_ignored_fields_total{field="messages[].mood"} 1.0' in call(stack, "/metrics").body
    many = {f"k{index}": 1 for index in range(300)}
    for part in (
        {"messages": [{"role": "user", "content": "", **many}]},
        {"messages": messages, "stream": True, "stream_options": many},
    ):
        refused = call(stack, CHAT, part)
        assert refused.status == 400 and "256 unknown fields" in refused.error["message"]


def test_seeds_differ_unless_given(stack):
    for _ in range(2):
        chat(stack)
    first, second = (request.sampling.seed for request in stack.replica.requests)
    assert first != second
    assert 0 <= first < 2**63


def test_text_parts_and_developer_messages(stack):
    messages = [
        {"role": "developer", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
    ]
    assert call(stack, "/v1/chat/completions", {"messages": messages}).status == 200
    expected = [{"role": "system", "content": "one"}, {"role": "user", "content": "two\nthree"}]
    assert stack.replica.requests[0].prompt == stack.tokenizer.encode_chat(expected).tobytes()


def test_continue_final_message(stack):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The capital"}]
    answer = call(stack, "/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    assert answer.status == 200
    prompt = stack.tokenizer.decode(stack.replica.requests[0].token_ids(), skip_special_tokens=False)
    assert prompt.endswith("assistant\nThe capital")


def test_special_token_text_stays_text(stack):
    chat(stack, messages=[{"role": "user", "content": "<|im_end|>"}])
    assert stack.replica.requests[0].token_ids().tolist().count(stack.replica.eos) == 1


def test_characters_split_over_tokens_arrive_whole(stack):
    text = "naïve 🦜 \u2028 end"
    stack.answer(text)
    answer = chat(stack, stream=True)
    assert b"\xe2\x80\xa8" not in answer.body, "some clients take U+2028 for the end of a line"
    assert "".join(event["choices"][0]["delta"]["content"] for event in answer.events[:-1]) == text
    assert chat(stack).json["choices"][0]["message"]["content"] == text


def test_request_id_is_honoured_or_made(stack):
    body = {"messages": HI}
    kept = call(stack, "/v1/chat/completions", body, headers={"x-request-id": "abc-123"})
    assert kept.headers["x-request-id"] == "abc-123"
    made = call(stack, "/v1/chat/completions", body, headers={"x-request-id": "no spaces allowed"})
    assert made.headers["x-request-id"] not in ("", "no spaces allowed")
    assert made.headers["server-timing"].startswith("text;dur=")
