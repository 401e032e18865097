"""reload: replace local replicas of a running server by new processes, without a failed request."""

from __future__ import annotations

import argparse

from headrace.cli.control_client import add_port, run_long
from headrace.core.control import Reload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        default="",
        metavar="MODEL|REPLICA",
        help="a model, all of whose replicas follow one another, or one replica (default: every replica)",
    )
    add_port(parser)


def main(arguments: argparse.Namespace) -> int:
    return run_long(arguments, Reload(arguments.target))
