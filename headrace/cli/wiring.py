"""Puts one server together and takes it apart again.

this process     the listening socket, the supervisor of replicas, the control socket, and a Front:
    LocalFront   gateway, dispatcher and router, here as well
    Gateways     a router process and K gateway processes, which accept on the same socket
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket as sockets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.cli.announce import Throughput, curl_line, print_model
from headrace.cli.console import Printer
from headrace.cli.disk_space import disk_warnings
from headrace.cli.front import Front, LocalFront, RouterLink
from headrace.cli.pack_check import check_pack
from headrace.cli.prepare import Prepared, prepare
from headrace.cli.settings import Settings
from headrace.cli.signals import Signals
from headrace.core.control import control_path
from headrace.core.errors import UnavailableError, UsageError
from headrace.core.packs import explicit_pack
from headrace.core.routing import ReplicaStatus
from headrace.core.version import __version__
from headrace.fleet.control import ControlServer
from headrace.fleet.place import LocalModel
from headrace.fleet.runtime_directory import RuntimeDirectory
from headrace.fleet.supervisor import Supervisor
from headrace.gateway.recorder import prepare_folder
from headrace.gateway.server import bind_socket
from headrace.text.tokenizer import Tokenizer

# How long the start waits for the first word about each worker.
WORKER_WAIT_S = 5.0
MEMBER_POLL_S = 0.02

log = logging.getLogger("headrace")


async def run_server(settings: Settings, printer: Printer) -> None:
    """Claims the port, loads text and weights side by side, then serves until a signal."""
    started = time.monotonic()
    _print_heading(settings, printer)
    if settings.gateway.record is not None:
        prepare_folder(Path(os.path.expanduser(settings.gateway.record)))
    with Signals() as signals:
        async with contextlib.AsyncExitStack() as stack:
            socket = stack.enter_context(bind_socket(settings.gateway))
            directory = stack.enter_context(RuntimeDirectory())
            for pack in _packs(settings):
                await asyncio.to_thread(check_pack, Path(pack))
            with printer.progress() as progress:
                models = [
                    await asyncio.to_thread(prepare, model, progress) for model in settings.deployment.models
                ]
                front = _front(settings, directory, lambda replica, pid: supervisor.kill(replica, pid))
                stack.push_async_callback(front.close)
                await front.start()
                supervisor = Supervisor(
                    front.router,
                    [_local(model) for model in models if model.folder],
                    directory=directory,
                    grace_s=settings.gateway.shutdown_grace_s,
                    logs=settings.logs,
                    verify_pack=check_pack,
                )
                # What ran has ended by then: the front stops before.
                stack.push_async_callback(supervisor.stop, 0.0)
                for model in models:
                    for worker in model.deployment.workers:
                        endpoint = worker.endpoint(model.deployment.name, has_tokenizer=bool(model.folder))
                        front.router.set_endpoint(endpoint)
                tokenizers, _ = await asyncio.gather(
                    asyncio.to_thread(_load_tokenizers, models, settings),
                    supervisor.start(lambda done, total: progress("loading weights", done, total)),
                )
            for tokenizer in tokenizers:
                if tokenizer is not None:
                    stack.callback(tokenizer.close)
            replicas = await _settled_replicas(front.router)
            for model in models:
                print_model(
                    printer,
                    model.deployment,
                    supervisor.hellos,
                    replicas,
                    heading=len(models) > 1,
                    text_reason=model.text_reason,
                )
            control = ControlServer(
                control_path(socket.getsockname()[1]),
                status=front.router.status,
                why=front.router.why,
                supervisor=supervisor,
            )
            try:
                await control.start()
            except UsageError as error:
                printer.warning(f"no `headrace ps` and the like: {error.message}; {error.hint}")
            stack.push_async_callback(control.close)
            reporter = asyncio.create_task(_report(front.router, settings.logs.stats_interval_s))
            stack.callback(reporter.cancel)

            def on_ready() -> None:
                signals.started()
                address = _address(settings, socket)
                seconds = time.monotonic() - started
                printer.line(f"running on {address} (Ctrl+C to quit), {seconds:.1f} s after the start")
                first = tokenizers[0]
                printer.line(
                    curl_line(
                        address,
                        models[0].deployment.name,
                        chat=first is None or first.has_chat_template,
                        has_key=bool(settings.gateway.api_key),
                    )
                )

            await front.serve(models, tokenizers, socket, on_ready, signals)


def _print_heading(settings: Settings, printer: Printer) -> None:
    names = [model.model or "of the workers" for model in settings.deployment.models]
    printer.line(f"headrace {__version__}, {'model' if len(names) == 1 else 'models'} {', '.join(names)}")
    if changed := settings.changed():
        printer.line("set: " + ", ".join(changed))
    engines = [replica.engine for model in settings.deployment.models for replica in model.replicas]
    for warning in (*settings.warnings, *disk_warnings(engines)):
        printer.warning(warning)


def _packs(settings: Settings) -> list[str]:
    """Folders of packs that were named for replicas to start with."""
    engines = [replica.engine for model in settings.deployment.models for replica in model.replicas]
    return sorted({explicit_pack(engine.pack) for engine in engines} - {""})


def _front(settings: Settings, directory: RuntimeDirectory, on_hang: Callable[[str, int], None]) -> Front:
    if settings.fleet.gateways == 1:
        return LocalFront(settings, on_hang)
    # Here, not above: what it needs is needed by few.
    from headrace.cli.gateways import Gateways

    return Gateways(settings, directory, on_hang)


def _local(model: Prepared) -> LocalModel:
    return LocalModel(model.deployment, Path(model.folder), model.revision)


def _load_tokenizers(models: Sequence[Prepared], settings: Settings) -> list[Tokenizer | None]:
    return [
        Tokenizer.from_folder(
            model.folder,
            chat_template=model.read_chat_template(),
            template_timeout_s=settings.gateway.chat_template_timeout_s,
        )
        if model.folder
        else None
        for model in models
    ]


async def _settled_replicas(router: RouterLink) -> dict[str, ReplicaStatus]:
    """The fleet once every worker was asked, or has kept us waiting for too long."""
    replicas: list[ReplicaStatus] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WORKER_WAIT_S):
            while True:
                replicas = (await router.status()).replicas
                if all(replica.member.state != "starting" for replica in replicas):
                    break
                await asyncio.sleep(MEMBER_POLL_S)
    return {replica.member.endpoint.replica_id: replica for replica in replicas}


async def _report(router: RouterLink, interval_s: float) -> None:
    """One line of throughput an interval; silent when nothing happened."""
    if interval_s <= 0:
        return
    throughput = Throughput()
    while True:
        await asyncio.sleep(interval_s)
        with contextlib.suppress(UnavailableError):  # the router restarts
            line = throughput.line(await router.status(), interval_s)
            if line is not None:
                log.info("%s", line)


def _address(settings: Settings, socket: sockets.socket) -> str:
    host = settings.gateway.host
    return f"http://{f'[{host}]' if ':' in host else host}:{socket.getsockname()[1]}"
