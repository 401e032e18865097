"""serve: serve models behind the OpenAI-compatible API, from replicas here and servers elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os

from headrace.cli.console import Printer
from headrace.cli.flags import add_flags
from headrace.cli.settings import load_settings
from headrace.core.knobs import EngineConfig, FleetConfig, GatewayConfig, LogConfig, RouterConfig
from headrace.core.logs import set_up_logging
from headrace.models.packages import DEFAULT_MODEL

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"short name, folder, .gguf file or hub id (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings, or of a whole deployment; flags and HEADRACE_* variables beat it",
    )
    add_flags(parser, "engine", EngineConfig)
    add_flags(parser, "fleet", FleetConfig)
    add_flags(parser, "router", RouterConfig)
    add_flags(parser, "gateway", GatewayConfig)
    add_flags(parser, "log", LogConfig)


def main(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments, os.environ)
    set_up_logging(settings.logs)
    import uvloop

    from headrace.cli.wiring import run_server

    try:
        uvloop.run(run_server(settings, Printer(as_log=settings.logs.log_json)))
    except asyncio.CancelledError:
        return INTERRUPTED
    return 0
