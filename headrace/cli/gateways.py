"""How requests come in and find their replica with `--gateways K`: a router process, K gateway processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket as sockets
from collections.abc import Callable, Sequence

from headrace.cli.front import RouterLink
from headrace.cli.prepare import Prepared
from headrace.cli.settings import Settings
from headrace.cli.signals import Signals
from headrace.core.launch import GatewaySpec, RouterSpec
from headrace.fleet.child import Child
from headrace.fleet.children import gateway_process, router_process
from headrace.fleet.runtime_directory import RuntimeDirectory
from headrace.router.remote import RemotePlacer
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger("headrace")


class Gateways:
    """This process supervises; all sockets but the control socket are the children's."""

    def __init__(
        self, settings: Settings, directory: RuntimeDirectory, on_hang: Callable[[str, int], None]
    ) -> None:
        """``on_hang`` is told the replica and the pid of a process of ours that does not answer any more."""
        self._settings = settings
        self._router_socket = directory.socket("router")
        spec = RouterSpec(socket=self._router_socket, router=settings.router, logs=settings.logs)
        self._process = router_process(spec)
        self._placer = RemotePlacer(
            self._router_socket, peer="supervisor", log=log, config=settings.router, on_hang=on_hang
        )

    @property
    def router(self) -> RouterLink:
        return self._placer

    async def start(self) -> None:
        await self._process.start()
        self._placer.start()

    async def serve(
        self,
        models: Sequence[Prepared],
        tokenizers: Sequence[Tokenizer | None],
        socket: sockets.socket,
        on_ready: Callable[[], None],
        signals: Signals,
    ) -> None:
        """The gateways read the tokenizers themselves."""
        settings = self._settings
        children = [
            gateway_process(
                GatewaySpec(
                    gateway_id=f"gateway-{number}",
                    listener=socket.fileno(),
                    router_socket=self._router_socket,
                    models=[model.spec() for model in models],
                    gateway=settings.gateway,
                    router=settings.router,
                    logs=settings.logs,
                )
            )
            for number in range(settings.fleet.gateways)
        ]
        hurrying = asyncio.create_task(_hurry(children, signals.hurry))
        try:
            await asyncio.gather(*(child.start() for child in children))
            on_ready()
            await signals.stop.wait()
        finally:
            grace_s = settings.gateway.shutdown_grace_s
            await asyncio.gather(*(child.stop(grace_s) for child in children))
            hurrying.cancel()

    async def close(self) -> None:
        await self._placer.close()
        await self._process.stop(0.0)


async def _hurry(children: Sequence[Child], hurry: asyncio.Event) -> None:
    """Passes the second signal on; the first one reaches the gateways as they are stopped."""
    await hurry.wait()
    for child in children:
        if child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
