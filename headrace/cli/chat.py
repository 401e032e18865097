"""chat: talk to a model in the terminal, on a running server or on one started for the occasion."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp

from headrace.cli.console import Printer
from headrace.core.errors import HeadraceError, InvalidRequestError, StartupError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
START_TIMEOUT_S = 1800.0
PR_SET_PDEATHSIG = 1
HELP = """/new      forget the conversation
/system X  set the system message to X and start anew
/quit      leave (also Ctrl+D); Ctrl+C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="start a server for this model; without it, use the server at --url, or start the default model",
    )
    parser.add_argument(
        "--url", default=None, help=f"a running server (default: {DEFAULT_URL}, when one answers)"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("HEADRACE_API_KEY", ""), help="its key [HEADRACE_API_KEY]"
    )
    parser.add_argument(
        "--pack", default=None, metavar="PACK", help="kernels of a server that is started; as for serve"
    )
    parser.add_argument("--system", default=None, metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="FLOAT")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="INT")


def main(arguments: argparse.Namespace) -> int:
    printer = Printer()
    with contextlib.ExitStack() as stack:
        url = arguments.url or DEFAULT_URL
        wants_own = arguments.model is not None and arguments.url is None
        if wants_own or (arguments.url is None and not asyncio.run(_answers(url))):
            url = stack.enter_context(_own_server(arguments.model, arguments.api_key, arguments.pack))
        return asyncio.run(_Conversation(url.rstrip("/"), arguments, printer).loop())


class _Conversation:
    def __init__(self, url: str, arguments: argparse.Namespace, printer: Printer) -> None:
        self.url = url
        self.system: str | None = arguments.system
        self.temperature = arguments.temperature
        self.max_tokens = arguments.max_tokens
        self.headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
        self.printer = printer
        self.messages: list[dict[str, str]] = []

    async def loop(self) -> int:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(headers=self.headers, timeout=timeout) as session:
            model = await self._model(session)
            self._start_anew()
            if sys.stdin.isatty():
                self.printer.line(f"{model} at {self.url}. /help lists the commands.")
            while (text := await asyncio.to_thread(_read_line)) is not None:
                if not text.strip():
                    continue
                if text.startswith("/"):
                    if not self._command(text.strip()):
                        break
                    continue
                await self._turn(session, model, text)
        return 0

    def _start_anew(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _command(self, text: str) -> bool:
        word, _, rest = text.partition(" ")
        if word in ("/quit", "/exit"):
            return False
        if word == "/new":
            self._start_anew()
        elif word == "/system":
            self.system = rest.strip() or None
            self._start_anew()
        else:
            self.printer.line(HELP)
        return True

    async def _model(self, session: aiohttp.ClientSession) -> str:
        try:
            async with session.get(f"{self.url}/v1/models") as response:
                body = await response.json(content_type=None)
                if response.status != 200:
                    raise InvalidRequestError(_error_text(body, response.status))
                return str(body["data"][0]["id"])
        except (aiohttp.ClientError, json.JSONDecodeError, KeyError, IndexError) as error:
            raise UnavailableError(
                f"no server that speaks the OpenAI API at {self.url}: {error}",
                hint="start one with `headrace serve`, or name a MODEL to have one started",
            ) from error

    async def _turn(self, session: aiohttp.ClientSession, model: str, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        answer = asyncio.create_task(self._stream(session, model))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, answer.cancel)
        try:
            self.messages.append({"role": "assistant", "content": await answer})
        except asyncio.CancelledError:
            self.messages.pop()
            print("\n(stopped; this turn is forgotten)", flush=True)
        except (HeadraceError, aiohttp.ClientError) as error:
            self.messages.pop()
            print(f"error: {error}", file=sys.stderr, flush=True)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _stream(self, session: aiohttp.ClientSession, model: str) -> str:
        body = {
            "model": model,
            "messages": self.messages,
            "stream": True,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        pieces: list[str] = []
        async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise InvalidRequestError(
                    _error_text(await response.json(content_type=None), response.status)
                )
            async for line in response.content:
                data = line.strip().removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise UnavailableError(_error_text(event, 500))
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        print(flush=True)
        return "".join(pieces)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _error_text(body: Any, status: int) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else f"HTTP {status}"


async def _answers(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=2)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/ready") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


@contextlib.contextmanager
def _own_server(model: str | None, api_key: str, pack: str | None) -> Iterator[str]:
    """Starts `headrace serve` on a free port and ends it afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "headrace.cli.main",
        "serve",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    environment = os.environ | ({"HEADRACE_API_KEY": api_key} if api_key else {})
    server = subprocess.Popen(
        [*command, *(["--pack", pack] if pack else []), *([model] if model else [])],
        env=environment,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 (one system call, and no thread runs yet)
    )
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_wait_ready(url, server))
        yield url
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _die_with_parent() -> None:
    """Asks the kernel for a SIGTERM when the parent ends in a way that runs no ``finally``."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while not await _answers(url):
        if server.poll() is not None:
            raise StartupError(f"the server ended with exit code {server.returncode} before it was ready")
        if asyncio.get_running_loop().time() > deadline:
            raise StartupError(f"the server was not ready within {START_TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.1)
