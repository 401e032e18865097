"""``python -m headrace.router``: a RouterSpec line in, a StartEvent line out, then a socket for its peers.

It ends on SIGTERM, or when its standard input does: then its parent is gone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

import uvloop

from headrace.core.errors import HeadraceError
from headrace.core.launch import RouterSpec
from headrace.core.logs import set_up_logging
from headrace.core.process import StartReporter, bind_unix, read_spec, spare_the_loaded, until_orphaned
from headrace.router.external import make_monitor
from headrace.router.service import RouterService

log = logging.getLogger("headrace.router")


def main() -> int:
    """Returns the process's exit code."""
    report = StartReporter()
    try:
        spec = read_spec(RouterSpec)
        set_up_logging(spec.logs)
        listener = bind_unix(Path(spec.socket))
    except HeadraceError as error:
        report.error(error)
        return error.exit_code
    spare_the_loaded()
    uvloop.run(_serve(spec, listener, report))
    return 0


async def _serve(spec: RouterSpec, listener: socket.socket, report: StartReporter) -> None:
    service = RouterService(spec.router, log=log, make_monitor=make_monitor)
    loop = asyncio.get_running_loop()
    with until_orphaned() as stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await service.start(listener)
        report.ready()
        await stop.wait()
        await service.close()
    Path(spec.socket).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
