"""``headrace``: finds the command, runs it, and turns every error into one line, a hint and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. The commands of the loop
end on SIGTERM with 143, and tidy up first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from headrace.cli import (
    chat,
    collect_env,
    judge,
    optimize,
    packs,
    profile,
    ps,
    reload,
    replay,
    rounds,
    run,
    scale,
    serve,
    why,
)
from headrace.core.engine_environment import adopt_engine_environment
from headrace.core.errors import HeadraceError
from headrace.core.version import __version__

Command = Callable[[argparse.Namespace], int]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        allow_abbrev=False,
        description="Serves open-weight language models behind an OpenAI-compatible API.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    loop = (profile, optimize, judge, rounds, packs)
    for module in (serve, ps, why, scale, reload, chat, run, replay, *loop, collect_env):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        summary = (module.__doc__ or "").strip().splitlines()[0].partition(": ")[2]
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.main, unwinds=module in loop)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    command: Command = arguments.run
    adopt_engine_environment()
    try:
        with _unwinding() if arguments.unwinds else contextlib.nullcontext():
            return command(arguments)
    except HeadraceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away; nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM ends what runs here as an exception does, so that what it holds (children, temporary folders)
    is put away; a second one ends it at once."""

    def unwind(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
