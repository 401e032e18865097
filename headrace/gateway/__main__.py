"""``python -m headrace.gateway``: one of several gateway processes beside one router process.

One JSON line in (GatewaySpec), one JSON line out when it serves; it accepts on a socket that it inherits.
It ends, gracefully, on SIGTERM or when its standard input does: then its parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from pathlib import Path

import uvloop

from headrace.core.errors import EngineError, HeadraceError, UsageError
from headrace.core.launch import GatewaySpec, ServedModelSpec
from headrace.core.logs import set_up_logging
from headrace.core.process import StartReporter, read_spec, spare_the_loaded, until_orphaned
from headrace.gateway.server import serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.router.dispatcher import Dispatcher
from headrace.router.external import make_worker
from headrace.router.remote import RemotePlacer
from headrace.text.tokenizer import Tokenizer

ROUTER_WAIT_S = 10.0

log = logging.getLogger("headrace.gateway")


def main() -> int:
    """Returns the process's exit code."""
    report = StartReporter()
    try:
        spec = read_spec(GatewaySpec)
        set_up_logging(spec.logs)
        listener = socket.socket(fileno=spec.listener)
        listener.setblocking(False)
        tokenizers = [_tokenizer(model, spec) for model in spec.models]
    except HeadraceError as error:
        report.error(error)
        return error.exit_code
    except Exception as error:
        log.exception("the gateway could not start")
        report.error(EngineError(f"the gateway could not start: {type(error).__name__}: {error}"))
        return 1
    spare_the_loaded()
    uvloop.run(_serve(spec, listener, tokenizers, report))
    for tokenizer in tokenizers:
        if tokenizer is not None:
            tokenizer.close()
    return 0


async def _serve(
    spec: GatewaySpec, listener: socket.socket, tokenizers: list[Tokenizer | None], report: StartReporter
) -> None:
    placer = RemotePlacer(spec.router_socket, peer=spec.gateway_id, config=spec.router, log=log)
    dispatcher = Dispatcher(placer, spec.router, log=log, make_worker=make_worker)
    models = [
        ServedModel(model.model, model.names, tokenizer, dispatcher, source=model.source)
        for model, tokenizer in zip(spec.models, tokenizers, strict=True)
    ]
    gateway = Gateway(spec.gateway, models=models, dispatcher=dispatcher, log=log, gateway_id=spec.gateway_id)
    placer.start()
    dispatcher.start()
    reporting = asyncio.create_task(gateway.report_forever())
    try:
        # Otherwise the first callers would hear that no replica is ready.
        if not await placer.wait_told(ROUTER_WAIT_S):
            log.warning("the router has not answered for %g s", ROUTER_WAIT_S)
        with until_orphaned() as stop:
            await serve(
                gateway,
                spec.gateway,
                log=log,
                on_ready=lambda address: report.ready(),
                stop=stop,
                socket=listener,
            )
    finally:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
        await dispatcher.close()
        await placer.close()


def _tokenizer(model: ServedModelSpec, spec: GatewaySpec) -> Tokenizer | None:
    """None for a model whose text passes through. Raises StartupError."""
    if not model.folder:
        return None
    template = model.chat_template
    if template is not None:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"chat template {template}: cannot be read: {error}") from error
    return Tokenizer.from_folder(
        model.folder, chat_template=template, template_timeout_s=spec.gateway.chat_template_timeout_s
    )


if __name__ == "__main__":
    sys.exit(main())
