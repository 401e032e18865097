"""Talks to a running server on its control socket, for the commands ps, why, scale, reload and packs."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from headrace.cli.flags import load_config
from headrace.core.control import Done, FromServer, Progress, Refusal, ToServer, control_path
from headrace.core.errors import EngineError, UnavailableError
from headrace.core.knobs import GatewayConfig
from headrace.core.wire import FrameDecoder, FrameError, encode_frame

ANSWER_TIMEOUT_S = 30.0
START_S = 120.0
SILENCE_S = 1.0
RECEIVE_BYTES = 1 << 16
VERSION_HINT = "is it another version of headrace?"


def add_port(parser: argparse.ArgumentParser) -> None:
    """``--port`` as `headrace serve` has it."""
    default = GatewayConfig().port
    parser.add_argument(
        "--port",
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"port of the running server [HEADRACE_PORT; default: {default}]",
    )


Reply = TypeVar("Reply", bound=FromServer)


def ask(
    arguments: argparse.Namespace, message: ToServer, wanted: type[Reply], *, timeout_s: float | None
) -> Reply:
    """The server's last word about ``message``; its progress goes to stderr meanwhile.

    ``timeout_s`` bounds each wait for a word (None: no bound). Raises what the server refuses with,
    UnavailableError when none listens, and EngineError for an answer of another kind.
    """
    return ask_port(port_of(arguments), message, wanted, timeout_s=timeout_s)


def port_of(arguments: argparse.Namespace) -> int:
    """The port of the server that is meant: the flag's, the environment's, or the default."""
    given = {"port": arguments.port} if "port" in arguments else {}
    return load_config(GatewayConfig, given, os.environ, {}).port


def ask_port(
    port: int,
    message: ToServer,
    wanted: type[Reply],
    *,
    timeout_s: float | None,
    say: Callable[[str], None] | None = None,
) -> Reply:
    """As ``ask``, of the server on ``port``; ``say`` gets the lines of its progress instead."""
    for reply in _replies(port, message, timeout_s):
        if isinstance(reply, Progress):
            if say is not None:
                say(reply.line)
            else:
                print(reply.line, file=sys.stderr, flush=True)
            continue
        if isinstance(reply, Refusal):
            error = reply.failed.to_error()
            error.hint = reply.hint
            raise error
        if not isinstance(reply, wanted):
            raise EngineError(f"the server answered with {type(reply).__name__}", hint=VERSION_HINT)
        return reply
    raise UnavailableError(
        f"the server on port {port} hung up before it was done", hint="its log, on its stderr, says why"
    )


def run_long(arguments: argparse.Namespace, message: ToServer) -> int:
    """Has the server do something that takes its time; prints what came of it."""
    print(ask(arguments, message, Done, timeout_s=None).line)
    return 0


def ask_started(
    port: int, message: ToServer, wanted: type[Reply], *, timeout_s: float, say: Callable[[str], None]
) -> Reply:
    """As ``ask_port``, of a server that may just be starting: then its port is taken and says nothing yet."""
    deadline = time.monotonic() + START_S
    told = False
    while _is_silent(port) and time.monotonic() < deadline:
        if not told:
            say(f"waiting for the server on port {port} to start")
            told = True
    return ask_port(port, message, wanted, timeout_s=timeout_s)


def _is_silent(port: int) -> bool:
    """Whether something has the port and lets a request wait."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=SILENCE_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            connection.recv(1)
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


def _replies(port: int, message: ToServer, timeout_s: float | None) -> Iterator[FromServer]:
    decoder: FrameDecoder[FromServer] = FrameDecoder(FromServer)
    with _connect(port) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.sendall(encode_frame(message))
            while data := connection.recv(RECEIVE_BYTES):
                yield from decoder.feed(data)
        except TimeoutError:
            raise UnavailableError(
                f"the server on port {port} did not answer within {timeout_s:.0f} s",
                hint="it may be overloaded; try again, or look at its log",
            ) from None
        except ConnectionError:
            return
        except FrameError as error:
            raise EngineError(
                f"the server on port {port} speaks another language: {error}",
                hint=VERSION_HINT,
            ) from error


def _connect(port: int) -> socket.socket:
    path = control_path(port)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        if isinstance(error, PermissionError):
            raise UnavailableError(
                f"the server on port {port} belongs to another user", hint=f"see who owns {path}"
            ) from error
        raise UnavailableError(
            f"no headrace server runs on port {port}",
            hint="start one with `headrace serve`, or name its port with --port",
        ) from error
    return connection
