"""The whole system on real weights: two processes, real sockets, the official client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.system.server import Server

QUESTION: list[Any] = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    values = re.findall(rf"^{name}(?:_total)?(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    assert values, f"{name} is not in /metrics"
    return sum(map(float, values))


def wait_idle(server: Server) -> None:
    for _ in range(600):
        if (
            metric(server, "headrace_num_requests_running") == 0
            and metric(server, "headrace_kv_cache_usage_perc") == 0
        ):
            return
        time.sleep(0.05)
    raise AssertionError("blocks are still held")


def test_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=32
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 1


def test_paris_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2-135m",
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len([chunk for chunk in chunks if chunk.choices]) > 4, "tokens arrive one by one"
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    whole = client.chat.completions.create(
        model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=32
    )
    assert whole.choices[0].message.content == text


def test_the_next_turn_hits_the_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me about rivers. " * 20}]
    first = client.chat.completions.create(
        model="smollm2-135m", messages=messages, temperature=0, max_tokens=40
    )  # type: ignore[arg-type]
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "And about mountains?"},
    ]
    second = client.chat.completions.create(
        model="smollm2-135m", messages=messages, temperature=0, max_tokens=4
    )  # type: ignore[arg-type]
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert first.usage is not None and cached > 0.7 * first.usage.prompt_tokens


def test_seeded_sampling_is_the_same_alone_and_in_company(client: openai.OpenAI) -> None:
    def sample(n: int) -> list[str]:
        answer = client.chat.completions.create(
            model="smollm2-135m", messages=QUESTION, temperature=1.0, seed=11, n=n, max_tokens=12
        )
        return [choice.message.content or "" for choice in answer.choices]

    # bf16: the first tokens agree unless two candidates are within the noise floor of each other.
    assert sample(1)[0][:12] == sample(4)[0][:12]


def test_a_disconnect_frees_the_blocks(server: Server) -> None:
    body = {
        "model": "smollm2-135m",
        "prompt": "Once upon a time",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")
    wait_idle(server)


def test_special_token_text_stays_text(client: openai.OpenAI, server: Server) -> None:
    def count(content: str) -> int:
        request = urllib.request.Request(
            f"{server.url}/tokenize",
            data=json.dumps({"messages": [{"role": "user", "content": content}]}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return int(json.load(response)["count"])

    assert count("<|im_end|>") > count("x") + 2


def test_a_killed_replica_is_replaced(server: Server, client: openai.OpenAI) -> None:
    os.kill(server.replica_pid(), signal.SIGKILL)
    for _ in range(300):
        try:
            answer = client.chat.completions.create(
                model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=32
            )
        except openai.InternalServerError as error:
            assert error.status_code == 503
            time.sleep(0.1)
            continue
        assert "Paris" in (answer.choices[0].message.content or "")
        return
    raise AssertionError("the replica did not come back")


def test_sigterm_lets_a_running_answer_finish() -> None:
    with Server("--served-model-name", "m") as own:
        with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="m",
                prompt="Once",
                max_tokens=100,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = iter(stream)
            next(chunks)
            own.terminate()
            reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] == "length"
        assert own.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no-such-model"], 1, "no-such-model"),
        (["--max-model-len", "9999999"], 2, "max-model-len"),
        (["--kv-cache-gib", "0.001"], 1, "GiB"),
        (["--host", "256.0.0.1"], 2, "256.0.0.1"),
    ],
)
def test_a_bad_start_says_why(arguments: list[str], code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "error: " in done.stderr and words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_told_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "headrace.cli.main", "serve", "--port", port],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert port in done.stderr and "hint: " in done.stderr


def test_run_answers_offline(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace.cli.main",
            "run",
            "smollm2-135m",
            "Name the capital of France.",
            "--temperature",
            "0",
            "--max-tokens",
            "32",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_chat_talks_to_a_running_server(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "chat", "--url", server.url, "--temperature", "0"],
        input="Name the capital of France.\n/quit\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
