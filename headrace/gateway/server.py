"""Runs the gateway on a TCP socket until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket as sockets
import sys
from collections.abc import Callable, Iterator
from email.utils import formatdate

from headrace.core.errors import HeadraceError, UnavailableError, UsageError
from headrace.core.knobs import GatewayConfig
from headrace.gateway.app import App
from headrace.gateway.exchange import Exchange
from headrace.gateway.protocol import HttpConnection, Limits
from headrace.gateway.state import Gateway

LIMITS = Limits()
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
    gateway: Gateway,
    config: GatewayConfig,
    *,
    log: logging.Logger,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
    socket: sockets.socket | None = None,
    handle_signals: bool = True,
) -> None:
    """Serves until SIGINT, SIGTERM or ``stop``, then lets running requests finish within the grace.

    What is open after the grace, or at a second signal or ``hurry``, ends with an error. ``on_ready`` is
    called once with the address when the socket listens. The gateway is closed here, its dispatcher is not.
    UsageError when the port is taken.
    """
    sock = bind_socket(config) if socket is None else socket
    app = App(gateway)
    server = HttpServer(app.handle, refused=app.refused)
    asked, asked_again = asyncio.Event(), hurry or asyncio.Event()

    def request_stop() -> None:
        if asked.is_set():
            asked_again.set()
        asked.set()

    waiter = asyncio.create_task(_stop_on(stop, request_stop)) if stop is not None else None
    try:
        with _signals(request_stop) if handle_signals else contextlib.nullcontext(), _switch_interval():
            await server.start(sock)
            if on_ready is not None:
                on_ready(_address(config, sock))
            await asked.wait()
            gateway.draining = True
            running = gateway.admission.in_use
            if running:
                log.info(
                    "stopping; requests still running: %d, for up to %g s", running, config.shutdown_grace_s
                )
            server.stop()
            if not await _first_of(config.shutdown_grace_s, server.all_closed, asked_again):
                reason = "the server is shutting down"
                gateway.dispatcher.end_all(reason)
                server.fail_bodies(UnavailableError(reason, code="shutting_down"))
                await _first_of(CLOSING_S, server.all_closed)
    finally:
        if waiter is not None:
            waiter.cancel()
        await server.close()
        await app.close()
        gateway.close()
        sock.close()


class HttpServer:
    """All connections of one listening socket, and the sweep over their deadlines."""

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        *,
        limits: Limits = LIMITS,
        refused: Callable[[int], None] = lambda status: None,
    ) -> None:
        self.handle = handle
        self.refused = refused
        self.limits = limits
        self.date = _date_line()
        self.stopping = False
        self.all_closed = asyncio.Event()
        """Set when the server has stopped and no connection is left."""
        self._connections: set[HttpConnection] = set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self, sock: sockets.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: HttpConnection(self), sock=sock, backlog=BACKLOG)
        self._sweep()

    def stop(self) -> None:
        """Takes no new connection, closes idle ones now, and others after their running response."""
        self.stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.stop()
        if not self._connections:
            self.all_closed.set()

    def fail_bodies(self, error: HeadraceError) -> None:
        """Ends the requests whose bodies are still on their way."""
        for connection in list(self._connections):
            connection.fail_body(error)

    async def close(self) -> None:
        """Cuts whatever is still connected."""
        self.stop()
        for connection in list(self._connections):
            connection.abort()
        await self.all_closed.wait()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is not None:
            await self._listener.wait_closed()

    def opened(self, connection: HttpConnection) -> None:
        self._connections.add(connection)
        if self.stopping:
            connection.stop()

    def closed(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        if self.stopping and not self._connections:
            self.all_closed.set()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.date = _date_line()
        for connection in [each for each in self._connections if each.deadline < now]:
            connection.expire(now)
        self._sweeper = loop.call_later(self.limits.sweep_s, self._sweep)


async def _first_of(seconds: float, *events: asyncio.Event) -> bool:
    """Waits for any of the events, no longer than this; whether the first of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return events[0].is_set()


async def _stop_on(stop: asyncio.Event, request_stop: Callable[[], None]) -> None:
    await stop.wait()
    request_stop()


@contextlib.contextmanager
def _signals(request_stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, request_stop)
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


def _date_line() -> bytes:
    return f"date: {formatdate(usegmt=True)}\r\n".encode()


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
