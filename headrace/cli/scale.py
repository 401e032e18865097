"""scale: change the number of local replicas of a running server."""

from __future__ import annotations

import argparse
from typing import get_args

from headrace.cli.control_client import add_port, run_long
from headrace.core.control import Scale
from headrace.core.errors import UsageError
from headrace.core.routing import Role

MAX_REPLICAS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replicas", metavar="N", help="local replicas there are to be; the rest are drained")
    parser.add_argument("--model", default="", metavar="NAME", help="which model (default: the only one)")
    parser.add_argument(
        "--role",
        choices=get_args(Role),
        help="which of its replicas, where they have several roles (default: the only one)",
    )
    add_port(parser)


def main(arguments: argparse.Namespace) -> int:
    if not (arguments.replicas.isascii() and arguments.replicas.isdigit()):
        raise UsageError(
            f"N: expected a number of replicas, got {arguments.replicas!r}", hint="headrace scale 3"
        )
    count = int(arguments.replicas)
    if count > MAX_REPLICAS:
        raise UsageError(f"N: at most {MAX_REPLICAS} replicas fit one server, got {count}")
    return run_long(arguments, Scale(count, arguments.model, arguments.role))
