"""Puts one server together and takes it apart again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from headrace.cli.announce import Throughput, curl_line, print_model
from headrace.cli.console import Printer
from headrace.cli.prepare import Prepared, prepare
from headrace.cli.settings import Settings
from headrace.core.errors import UsageError
from headrace.core.messages import Hello
from headrace.core.routing import Endpoint, Member
from headrace.core.version import __version__
from headrace.core.wire import gateway_decoder
from headrace.fleet.local import LocalReplica
from headrace.gateway.server import bind_socket, serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.router.dispatcher import Dispatcher
from headrace.router.external import make_monitor, make_worker
from headrace.router.placer import LocalPlacer, Placer
from headrace.text.tokenizer import Tokenizer

WORKER_WAIT_S = 5.0
MEMBER_POLL_S = 0.02
READ_BYTES = 1 << 16

log = logging.getLogger("headrace")


async def run_server(settings: Settings, printer: Printer) -> None:
    """Claims the port, loads text and weights side by side, then serves until a signal."""
    started = time.monotonic()
    models = settings.deployment.models
    printer.line(
        f"headrace {__version__}, model {', '.join(model.model or 'of the workers' for model in models)}"
    )
    if changed := settings.changed():
        printer.line("set: " + ", ".join(changed))
    for warning in settings.warnings:
        printer.warning(warning)
    async with contextlib.AsyncExitStack() as stack:
        socket = bind_socket(settings.gateway)
        stack.callback(socket.close)
        with printer.progress() as progress:
            prepared = [await asyncio.to_thread(prepare, model, progress) for model in models]
            placer = LocalPlacer(settings.router, log=log, make_monitor=make_monitor)
            placer.start()
            stack.push_async_callback(placer.close)
            replicas: list[LocalReplica] = []
            tokenizers = asyncio.create_task(asyncio.to_thread(load_tokenizers, prepared, settings))
            for model in prepared:
                for replica in model.deployment.replicas:
                    local = LocalReplica(
                        replica_id=replica.id,
                        model=model.deployment.model,
                        folder=Path(model.folder),
                        revision=model.revision,
                        engine=replica.engine,
                        logs=settings.logs,
                        on_loading=lambda done, total: progress("loading weights", done, total),
                    )
                    await local.start()
                    stack.push_async_callback(local.stop, settings.gateway.shutdown_grace_s)
                    replicas.append(local)
                    placer.set_endpoint(
                        Endpoint(
                            replica_id=replica.id,
                            model=model.deployment.name,
                            address=local.socket,
                            kind="headrace",
                        )
                    )
                for worker in model.deployment.workers:
                    placer.set_endpoint(worker.endpoint(model.deployment.name))
            loaded = await tokenizers
        hellos = {local.spec.replica_id: await greet(local.socket) for local in replicas}
        dispatcher = Dispatcher(placer, settings.router, log=log, make_worker=make_worker)
        dispatcher.start()
        stack.push_async_callback(dispatcher.close)
        served = [
            ServedModel(model.deployment.name, model.deployment.names, tokenizer, dispatcher)
            for model, tokenizer in zip(prepared, loaded, strict=True)
        ]
        for tokenizer in loaded:
            if tokenizer is not None:
                stack.callback(tokenizer.close)
        members = await settled_members(placer)
        for model in prepared:
            print_model(
                printer,
                model.deployment,
                hellos,
                members,
                heading=len(prepared) > 1,
                text_reason=model.text_reason,
            )
        gateway = Gateway(settings.gateway, models=served, dispatcher=dispatcher, log=log)
        reporter = asyncio.create_task(report(placer, settings.logs.stats_interval_s))

        def on_ready(address: str) -> None:
            printer.line(
                f"running on {address} (Ctrl+C to quit), {time.monotonic() - started:.1f} s after the start"
            )
            first = served[0]
            printer.line(
                curl_line(
                    address,
                    first.names[0],
                    chat=first.tokenizer is None or first.tokenizer.has_chat_template,
                    has_key=bool(settings.gateway.api_key),
                )
            )

        try:
            await serve(gateway, settings.gateway, log=log, on_ready=on_ready, socket=socket)
        finally:
            reporter.cancel()


def load_tokenizers(models: list[Prepared], settings: Settings) -> list[Tokenizer | None]:
    return [
        Tokenizer.from_folder(
            model.folder,
            chat_template=None
            if model.deployment.chat_template is None
            else Path(model.deployment.chat_template).read_text(encoding="utf-8"),
            template_timeout_s=settings.gateway.chat_template_timeout_s,
        )
        if model.folder
        else None
        for model in models
    ]


async def greet(socket: str) -> Hello:
    """What a replica says of itself."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        decoder = gateway_decoder()
        while data := await reader.read(READ_BYTES):
            for message in decoder.feed(data):
                if isinstance(message, Hello):
                    return message
        raise UsageError("replica gone")
    finally:
        writer.close()
        await writer.wait_closed()


async def settled_members(placer: Placer) -> dict[str, Member]:
    """The fleet once every worker has been asked, or has not answered for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WORKER_WAIT_S):
            while True:
                members = [replica.member for replica in (await placer.status()).replicas]
                if all(member.state != "starting" for member in members):
                    break
                await asyncio.sleep(MEMBER_POLL_S)
    return {member.endpoint.replica_id: member for member in members}


async def report(placer: Placer, interval_s: float) -> None:
    """One line of throughput an interval; silent when nothing happened."""
    if interval_s <= 0:
        return
    throughput = Throughput()
    while True:
        await asyncio.sleep(interval_s)
        line = throughput.line(await placer.status(), interval_s)
        if line is not None:
            log.info("%s", line)
