"""Whatever comes in: an error in OpenAI's shape, and a server that goes on."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.core.knobs import GatewayConfig
from tests.gateway.tiny import CHAT, Answer, Stack, call, chat

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _server_goes_on(stack: Stack):
    yield
    assert chat(stack).json["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert stack.run(_in_use(stack)) == 0


async def _in_use(stack: Stack) -> int:
    return stack.client.num_open


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{'messages': []}",
        b'{"messages": [{"role": "user", "content": "hi"}]',
        b'{"messages": [{"role": "user", "content": "hi"}]} trailing',
        b'\xef\xbb\xbf{"messages": []}',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "hi"}], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "top_k": ' + b"9" * 400 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": [1]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": '
        + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
)  # fmt: skip
def test_malformed_bodies(stack, body):
    answer = call(stack, CHAT, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert stack.replica.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [*HI, {"role": "wizard", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": HI, "temperature": "hot"}, "temperature"),
        ({"messages": HI, "temperature": -0.1}, "temperature"),
        ({"messages": HI, "temperature": 1000}, "temperature"),
        ({"messages": HI, "top_p": 0}, "top_p"),
        ({"messages": HI, "top_p": 1.1}, "top_p"),
        ({"messages": HI, "top_k": -2}, "top_k"),
        ({"messages": HI, "min_p": 2}, "min_p"),
        ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
        ({"messages": HI, "presence_penalty": 3}, "presence_penalty"),
        ({"messages": HI, "n": 0}, "n"),
        ({"messages": HI, "n": 1000}, "n"),
        ({"messages": HI, "n": 1.5}, "n"),
        ({"messages": HI, "n": True}, "n"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens"),
        ({"messages": HI, "max_tokens": -5}, "max_tokens"),
        ({"messages": HI, "max_tokens": 1000}, "max_tokens"),
        ({"messages": HI, "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"messages": HI, "stop": ""}, "stop"),
        ({"messages": HI, "stop": ["x"] * 200}, "stop"),
        ({"messages": HI, "stop": "x" * 5000}, "stop"),
        ({"messages": HI, "stop": ["y", "x" * 5000]}, "stop[1]"),
        ({"messages": HI, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"messages": HI, "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"messages": HI, "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"messages": HI, "logit_bias": {"5": 1000}}, "logit_bias"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": HI, "stream": "yes"}, "stream"),
        ({"messages": HI, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HI, "seed": 2**64}, "seed"),
    ],
)
def test_wrong_values(stack, fields, param):
    answer = call(stack, CHAT, fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert stack.replica.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x" * 5000}}),
        ("audio", {"voice": "alloy", "format": "mp3"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("store", True),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("guided_json", {}),
    ],
)
def test_unsupported_fields_are_named(stack, field, value):
    answer = chat(stack, **{field: value})
    assert answer.status == 400
    assert answer.error["param"] == field
    assert answer.error["code"] == "unsupported_field"
    assert field in answer.error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content"),
    ],
)
def test_unsupported_parts_of_messages_are_named(stack, message, param):
    answer = chat(stack, messages=[message])
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (param, "unsupported_field")


def test_values_that_mean_off_are_accepted(stack):
    off = {
        "tools": [],
        "tool_choice": "none",
        "functions": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
    }
    answer = chat(stack, **off)
    assert answer.status == 200
    assert answer.headers["x-headrace-ignored-fields"] is None


def test_fields_nobody_defines_are_ignored_counted_and_listed(stack):
    answer = chat(stack, flux_capacitor=1.21, **{"evil\r\nname: 'x'": 1})
    assert answer.status == 200
    assert answer.headers["x-headrace-ignored-fields"] == "evil??name???x?,flux_capacitor"
    assert b'headrace_ignored_fields_total{field="flux_capacitor"}' in call(stack, "/metrics").body
    errors = chat(stack, flux_capacitor=1, temperature=-1)
    assert errors.status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b"{" + b",".join(b'"k%d":1' % index for index in range(50_000)) + b"}"),
        (CHAT, b'{"messages":[' + b'{"role":"user","content":""},' * 20_000 + b"{}]}"),
        (CHAT, b'{"messages":[],"chat_template_kwargs":{"a":[' + b"{}," * 500_000 + b"{}]}}"),
        ("/v1/completions", b'{"prompt":[' + b"1," * 2_000_000 + b"1]}"),
        ("/v1/completions", b'{"prompt":[' + b'"",' * 200_000 + b'""]}'),
        ("/detokenize", b'{"tokens":[' + b"1," * 2_000_000 + b"1]}"),
    ],
    ids=["fields", "messages", "kwargs", "ids", "prompts", "tokens"],
)
def test_bodies_made_of_too_many_small_things(stack, path, body):
    answer = call(stack, path, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


def test_unknown_model(stack):
    answer = chat(stack, model="gpt-5")
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert "tiny" in answer.error["message"]


def test_prompt_longer_than_the_context(stack):
    answer = chat(stack, messages=[{"role": "user", "content": "hello world " * 600}])
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert "512" in answer.error["message"]


def test_text_far_beyond_the_context_is_refused_before_it_is_tokenized(stack, monkeypatch):
    def untouched(*args, **kwargs):
        raise AssertionError("tokenized")

    monkeypatch.setattr(stack.tokenizer, "encode_chat", untouched)
    answer = chat(stack, messages=[{"role": "user", "content": "hello " * 200_000}])
    monkeypatch.undo()
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert "at least" in answer.error["message"]


def test_announced_body_is_refused_unread(stack):
    sock = socket.create_connection(("127.0.0.1", stack.port), timeout=20)
    with sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n")
        response = http.client.HTTPResponse(sock)
        response.begin()
        answer = Answer(response)
    assert answer.status == 413
    assert "--max-body-mb" in answer.error["message"]


def test_an_ordinary_client_that_sends_100_mb_gets_the_answer(stack):
    answer = call(stack, CHAT, b'{"messages": "' + b"x" * (100 << 20) + b'"}')
    assert answer.status == 413


def test_chunked_body_is_cut_at_the_limit(tokenizer, tmp_path):
    config = GatewayConfig(port=0, max_body_mb=0.01)
    with Stack(tokenizer, tmp_path, config) as small:
        sock = socket.create_connection(("127.0.0.1", small.port), timeout=20)
        with sock:
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            sock.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
            response = http.client.HTTPResponse(sock)
            response.begin()
            answer = Answer(response)
        assert answer.status == 413
        assert answer.error["code"] == "payload_too_large"


def test_chunked_body_is_read(stack):
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=20)
    raw = json.dumps({"messages": HI}).encode()
    connection.request("POST", CHAT, iter([raw[:7], raw[7:20], raw[20:]]))
    assert Answer(connection.getresponse()).status == 200
    connection.close()


def test_malformed_http_is_counted(stack):
    def counted() -> float:
        lines = call(stack, "/metrics").body.decode().splitlines()
        prefix = 'headrace_http_errors_total{status="431",'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(prefix))

    before = counted()
    with socket.create_connection(("127.0.0.1", stack.port), timeout=20) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 100_000 + b"\r\n\r\n")
        response = http.client.HTTPResponse(sock)
        response.begin()
        answer = Answer(response)
    assert answer.status == 431
    assert answer.error["code"] == "invalid_http"
    assert counted() == before + 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/nowhere", 404),
        ("GET", "/v1/models/unknown", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/health", 405),
        ("POST", "/v1/models/tiny", 405),
        ("PUT", "/tokenize", 405),
    ],
)
def test_wrong_routes_and_methods(stack, method, path, status):
    answer = call(stack, path, method=method)
    assert answer.status == status
    assert answer.error["type"] in ("not_found_error", "invalid_request_error")
    if status == 405:
        assert answer.headers["allow"]


def test_many_bad_requests_at_once(stack):
    bodies = [b"{", b'{"messages": []}', b'{"messages": [{"role": "user", "content": "\xff"}]}'] * 20
    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda body: call(stack, CHAT, body).status, bodies))
    assert statuses == [400] * len(bodies)
