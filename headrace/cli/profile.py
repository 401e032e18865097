"""profile: show where the time of a workload goes, op by op, against what the machine can do."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.console import Printer
from headrace.cli.flags import add_flags, load_config
from headrace.cli.pack_check import check_pack
from headrace.core.errors import StartupError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.packs import explicit_pack

if TYPE_CHECKING:
    from headrace.optimize.records import KernelProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="",
        help="short name, folder, .gguf file or hub id; with --trace a name to show, and may be left out",
    )
    parser.add_argument(
        "--workload",
        metavar="W",
        default="decode",
        help="decode, prefill, chat, or a file of recorded requests, one JSON object a line "
        "(prompt: text or token ids, max_tokens, arrival_s) [default: decode]",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="X", help="how long to measure [default: 20]"
    )
    parser.add_argument("--json", metavar="FILE", help="write the profile as JSON; -: on stdout, no table")
    parser.add_argument("--html", metavar="FILE", help="write one page with the roofline")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="read a torch profiler trace (.json, .json.gz) of any engine instead of running a model",
    )
    parser.add_argument(
        "--roofs",
        metavar="FILE",
        help="roofs of the trace's machine: what `python -m headrace.optimize.profile.roofs` printed there",
    )
    add_flags(parser, "engine", EngineConfig)


def main(arguments: argparse.Namespace) -> int:
    if not arguments.model and not arguments.trace:
        raise UsageError("a MODEL or --trace FILE is needed", hint="headrace profile smollm2-135m")
    if arguments.seconds <= 0:
        raise UsageError(f"--seconds must be above 0, got {arguments.seconds:g}", param="--seconds")
    printer = Printer()
    profile = _of_trace(arguments) if arguments.trace else _of_engine(arguments, printer)

    from headrace.optimize.profile.page import html_page
    from headrace.optimize.profile.table import print_profile

    text = msgspec.json.format(msgspec.json.encode(profile)) + b"\n"
    if arguments.json == "-":
        sys.stdout.buffer.write(text)
    else:
        print_profile(profile)
        if arguments.json:
            _write(Path(arguments.json), text)
    if arguments.html:
        _write(Path(arguments.html), html_page(profile).encode())
    return 0


def _of_engine(arguments: argparse.Namespace, printer: Printer) -> KernelProfile:
    if arguments.roofs:
        raise UsageError("--roofs goes with --trace: this machine's roofs are measured", param="--roofs")
    engine = load_config(EngineConfig, vars(arguments), os.environ, {})
    if pack := explicit_pack(engine.pack):
        check_pack(Path(pack))

    from headrace.optimize.profile.collect import collect

    with printer.progress() as loading:
        return collect(
            arguments.model,
            arguments.workload,
            config=engine,
            seconds=arguments.seconds,
            progress=printer.line,
            loading=loading,
        )


def _of_trace(arguments: argparse.Namespace) -> KernelProfile:
    from headrace.optimize.profile.trace import read_trace
    from headrace.optimize.records import Roofs

    roofs = None
    if arguments.roofs:
        try:
            roofs = msgspec.json.decode(Path(arguments.roofs).read_bytes(), type=Roofs)
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"--roofs {arguments.roofs}: {error}", param="--roofs") from None
    return read_trace(Path(arguments.trace), model=arguments.model, roofs=roofs)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
