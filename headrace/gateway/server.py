"""Runs the gateway on a TCP socket until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket as sockets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from headrace.core.errors import UsageError
from headrace.core.knobs import GatewayConfig
from headrace.gateway.app import create_app
from headrace.gateway.protocol import GatewayProtocol
from headrace.gateway.state import Gateway

if TYPE_CHECKING:
    from headrace.router.replica_client import ReplicaClient
    from headrace.text.tokenizer import Tokenizer

KEEP_ALIVE_S = 75
BACKLOG = 2048
SWITCH_INTERVAL_S = 0.001
CLOSING_S = 5
"""Time to write the last events after the grace has passed."""


def bind_socket(config: GatewayConfig) -> sockets.socket:
    """A listening socket; UsageError naming host and port when they cannot be had."""
    try:
        found = sockets.getaddrinfo(
            config.host, config.port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"cannot resolve the host {config.host!r}: {getattr(error, 'strerror', error)}",
            hint="Give --host an address of this machine, such as 127.0.0.1.",
            param="--host",
        ) from None
    family, kind, protocol, _, address = found[0]
    sock = sockets.socket(family, kind, protocol)
    try:
        sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_bind(config, error) from None
    sock.setblocking(False)
    return sock


async def serve(
    config: GatewayConfig,
    *,
    tokenizer: Tokenizer,
    client: ReplicaClient,
    model_name: str,
    served_names: Sequence[str],
    log: logging.Logger,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    handle_signals: bool = True,
    socket: sockets.socket | None = None,
) -> None:
    """Serves until SIGINT, SIGTERM or ``stop``, then lets running requests finish within the grace.

    ``client`` must be started, not necessarily connected; it is not closed here. ``on_ready`` is called
    once with the address when the socket listens. A second signal stops at once. UsageError when the port
    is taken.
    """
    sock = bind_socket(config) if socket is None else socket
    gateway = Gateway(
        config,
        tokenizer=tokenizer,
        client=client,
        model_name=model_name,
        served_names=served_names,
        log=log,
    )
    server = _Server(
        uvicorn.Config(
            create_app(gateway),
            http=GatewayProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.shutdown_grace_s) + CLOSING_S,
            backlog=BACKLOG,
        ),
        gateway,
        config.shutdown_grace_s,
    )
    server.on_listening = lambda: on_ready(_address(config, sock)) if on_ready is not None else None
    waiter = asyncio.create_task(_stop_on(stop, server)) if stop is not None else None
    try:
        with _signals(server) if handle_signals else contextlib.nullcontext(), _switch_interval():
            await server.serve(sockets=[sock])
    finally:
        if waiter is not None:
            waiter.cancel()
        gateway.close()
        sock.close()


class _Server(uvicorn.Server):
    """uvicorn's server with our signals, and running requests that end with an error rather than a cut."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, grace_s: float) -> None:
        super().__init__(config)
        self.on_listening: Callable[[], None] = lambda: None
        self._gateway = gateway
        self._grace_s = grace_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[sockets.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_listening()

    async def shutdown(self, sockets: list[sockets.socket] | None = None) -> None:
        self._gateway.draining = True
        running = self._gateway.admission.in_use
        if running:
            self._gateway.log.info(
                "stopping; requests still running: %d, for up to %g s", running, self._grace_s
            )
        loop = asyncio.get_running_loop()
        grace = loop.call_later(self._grace_s, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            grace.cancel()

    def request_stop(self) -> None:
        """Stops gracefully; the second time, ends running requests now."""
        if self.should_exit:
            self.force_exit = True
            self._end_requests()
        self.should_exit = True

    def _end_requests(self) -> None:
        self._gateway.client.fail_all("the server is shutting down")


async def _stop_on(stop: asyncio.Event, server: _Server) -> None:
    await stop.wait()
    server.request_stop()


@contextlib.contextmanager
def _signals(server: _Server) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, server.request_stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _switch_interval() -> Iterator[None]:
    """Lets the event loop get the interpreter back quickly from threads that do text work."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _address(config: GatewayConfig, sock: sockets.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{sock.getsockname()[1]}"


def _cannot_bind(config: GatewayConfig, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"port {config.port} on {config.host} is in use",
            hint="Stop what listens there, or choose another with --port (0 takes a free one).",
            param="--port",
        )
    if error.errno == errno.EACCES:
        return UsageError(
            f"port {config.port} on {config.host} needs privileges that this process lacks",
            hint="Choose a --port of 1024 or above.",
            param="--port",
        )
    return UsageError(
        f"cannot listen on {config.host}:{config.port}: {error.strerror}",
        hint="Give --host an address of this machine, such as 127.0.0.1.",
        param="--host",
    )
