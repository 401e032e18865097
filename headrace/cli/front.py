"""How requests come in and find their replica, in this process: gateway, dispatcher and router."""

from __future__ import annotations

import logging
import socket as sockets
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.cli.prepare import Prepared
from headrace.cli.settings import Settings
from headrace.cli.signals import Signals
from headrace.core.process import spare_the_loaded
from headrace.core.routing import Decision, Endpoint, FleetStatus
from headrace.gateway.server import serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.router.dispatcher import Dispatcher
from headrace.router.external import make_monitor, make_worker
from headrace.router.placer import LocalPlacer
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger("headrace")


class RouterLink(Protocol):
    """The router as the supervisor and the commands see it; questions raise UnavailableError."""

    def set_endpoint(self, endpoint: Endpoint) -> None: ...
    def remove_endpoint(self, replica_id: str) -> None: ...
    async def status(self) -> FleetStatus: ...
    async def why(self, request_id: str) -> list[Decision]: ...


class Front(Protocol):
    """Router and gateways, wherever they run."""

    @property
    def router(self) -> RouterLink: ...

    async def start(self) -> None:
        """The router runs, and can be told of replicas."""

    async def serve(
        self,
        models: Sequence[Prepared],
        tokenizers: Sequence[Tokenizer | None],
        socket: sockets.socket,
        on_ready: Callable[[], None],
        signals: Signals,
    ) -> None:
        """Answers requests on ``socket`` until told to stop, and lets running ones finish."""

    async def close(self) -> None: ...


class LocalFront:
    """All of it in this process."""

    def __init__(self, settings: Settings, on_hang: Callable[[str, int], None]) -> None:
        """``on_hang`` is told the replica and the pid of a process of ours that does not answer any more."""
        self._settings = settings
        self._placer = LocalPlacer(settings.router, log=log, make_monitor=make_monitor, on_hang=on_hang)

    @property
    def router(self) -> RouterLink:
        return self._placer

    async def start(self) -> None:
        self._placer.start()

    async def serve(
        self,
        models: Sequence[Prepared],
        tokenizers: Sequence[Tokenizer | None],
        socket: sockets.socket,
        on_ready: Callable[[], None],
        signals: Signals,
    ) -> None:
        settings = self._settings
        dispatcher = Dispatcher(self._placer, settings.router, log=log, make_worker=make_worker)
        dispatcher.start()
        spare_the_loaded()
        try:
            served = [
                ServedModel(
                    model.deployment.name,
                    model.deployment.names,
                    tokenizer,
                    dispatcher,
                    source=model.deployment.model,
                )
                for model, tokenizer in zip(models, tokenizers, strict=True)
            ]
            await serve(
                Gateway(settings.gateway, models=served, dispatcher=dispatcher, log=log),
                settings.gateway,
                log=log,
                on_ready=lambda _: on_ready(),
                socket=socket,
                handle_signals=False,
                stop=signals.stop,
                hurry=signals.hurry,
            )
        finally:
            await dispatcher.close()

    async def close(self) -> None:
        await self._placer.close()
