"""Several models behind one gateway, servers that are not ours, and a file that says so."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.system.home import Home
from tests.system.openai_server import OpenAIServer, free_port
from tests.system.server import COMMAND, Server, wait_until
from tests.system.tiny import write_model


def chat(server: Server, model: str | None) -> tuple[int, Any]:
    """Status and body of one short chat."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    if model is not None:
        body["model"] = model
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def models(server: Server) -> list[str]:
    return list(roots(server))


def roots(server: Server) -> dict[str, str]:
    """What each name was loaded from."""
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
        return {model["id"]: model["root"] for model in json.load(response)["data"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def test_two_models_and_a_worker_that_comes_later(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "deployment.yaml"
    file.write_text(
        f"""\
kv_cache_gib: 0.05
threads: 1
dtype: float32
models:
  - model: {folder}
    served_model_name: [small, tiny]
  - model: elsewhere
    workers:
      - url: http://127.0.0.1:{port}
        remote_model: theirs
"""
    )
    with Home() as home, Server("--config", str(file), environment=home.environment) as server:
        assert models(server)[0] == "small"
        assert roots(server) == {"small": str(folder), "tiny": str(folder), "elsewhere": "elsewhere"}
        assert f"worker 127.0.0.1:{port}: http://127.0.0.1:{port} takes no connection" in server.log
        assert "text mode: " in server.log
        for name, reported in (("small", "small"), ("tiny", "tiny"), (None, "small")):
            status, body = chat(server, name)
            assert (status, body["model"]) == (200, reported), body
        status, body = chat(server, "nothing")
        assert status == 404 and "small" in body["error"]["message"]
        status, body = chat(server, "elsewhere")
        assert status == 503 and set(body["error"]) == {"message", "type", "param", "code"}
        assert server.replicas()[f"127.0.0.1:{port}"]["member"]["state"] == "down"
        with OpenAIServer(port, "theirs") as theirs:
            wait_until(
                lambda: server.replicas()[f"127.0.0.1:{port}"]["member"]["state"] == "ready",
                "the worker is up",
            )
            status, body = chat(server, "elsewhere")
            assert status == 200 and body["choices"][0]["message"]["content"] == "I live elsewhere."
            assert "/v1/chat/completions" in theirs.paths
        table = server.command("ps").stdout
        assert f"127.0.0.1:{port}: " in table, "what this mode cannot do stands below the table"
        home.stop(server)


def test_worker_urls_alone_take_the_name_from_the_worker() -> None:
    with (
        Home() as home,
        OpenAIServer(0, "theirs") as theirs,
        Server("--worker-urls", f"{theirs.url}/v1", environment=home.environment) as server,
    ):
        assert models(server) == ["theirs"]
        assert "text mode: " in server.log
        status, body = chat(server, "theirs")
        assert status == 200 and body["choices"][0]["message"]["content"] == "I live elsewhere."
        assert server.pids("headrace.replica") == []
        scaled = server.command("scale", "1")
        assert scaled.returncode == 1 and "Traceback" not in scaled.stderr
        assert "error: no model has replicas here" in scaled.stderr and "hint: " in scaled.stderr
        assert chat(server, None)[0] == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models:\n  - model: m\n    replica: 2\n", ":3: unknown key 'replica'"),
        ("models:\n  - model: m\n    replicas: [{id: a}, {id: a}]\n", ":3: replica id 'a' is used twice"),
    ],
)
def test_a_bad_file_is_refused_at_start(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    done = subprocess.run(
        [*COMMAND, "serve", "--port", "0", "--config", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"error: {file}{words}" in done.stderr and "hint: " in done.stderr


def test_no_name_and_no_worker_that_answers_is_no_start() -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--port", "0", "--worker-urls", f"http://127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no MODEL is given" in done.stderr and "hint: " in done.stderr


def test_commands_without_a_server_say_so() -> None:
    for command in (["ps"], ["why", "x"], ["scale", "2"], ["reload"]):
        done = subprocess.run(
            [*COMMAND, *command, "--port", str(free_port())],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1 and done.stdout == ""
        assert "error: no headrace server runs on port" in done.stderr and "hint: " in done.stderr
