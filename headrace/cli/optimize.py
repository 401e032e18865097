"""optimize: make a model faster on a workload: profile, write kernels, judge them, publish and roll out."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.flags import add_flags, load_config
from headrace.cli.rounds import add_rounds_dir
from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig, GatewayConfig
from headrace.core.packs import AUTO

if TYPE_CHECKING:
    from headrace.optimize.loop import Limits
    from headrace.optimize.proposal import Proposer
    from headrace.optimize.records import Target
    from headrace.optimize.rounds import RoundEnd

PROPOSERS = ("search", "endpoint", "agent")
EXAMPLES = """
  headrace optimize kernels smollm2-135m --minutes 25
  headrace optimize kernels smollm2-135m --workload requests.jsonl --rollout 8000
  headrace optimize kernels smollm2-135m --proposer endpoint --endpoint http://127.0.0.1:8000
  headrace optimize kernels smollm2-135m --proposer agent --agent "my-agent --task task.md"
  headrace optimize kernels model.py:MyBlock
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    kernels = kinds.add_parser(
        "kernels",
        help="C++ kernels for the ops that hold the workload back",
        description="Finds the ops that hold a workload back and kernels that are faster on it.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kernels.add_argument(
        "model", metavar="MODEL", help="as `headrace serve` takes it, or path.py:Class, a module"
    )
    add = kernels.add_argument
    add(
        "--workload",
        default="decode",
        metavar="W",
        help="decode, prefill, chat, or a file of recorded requests [decode]",
    )
    add("--rounds", type=_positive, default=3, metavar="N", help="rounds at most, each on one target [3]")
    add("--minutes", type=float, default=0.0, metavar="M", help="stop about then [no limit]")
    add("--proposer", choices=PROPOSERS, default="search", help="who writes the candidates [search]")
    group = kernels.add_argument_group("proposers")
    add = group.add_argument
    add(
        "--endpoint",
        default="",
        metavar="URL",
        help="an OpenAI-compatible API [the server on this machine]; its key is read from OPENAI_API_KEY",
    )
    add("--endpoint-model", default="", metavar="NAME", help="which of its models [the first]")
    add("--endpoint-max-tokens", type=_positive, default=3072, metavar="N", help="longest answer [3072]")
    add("--agent", default="", metavar="COMMAND", help="a coding agent, started in the candidate's folder")
    add("--agent-minutes", type=float, default=15.0, metavar="M", help="its time for one candidate [15]")
    group = kernels.add_argument_group("rounds")
    add = group.add_argument
    add("--op", default="", metavar="OP", help="this op alone [what the roofline says]")
    add("--candidates", type=_positive, default=24, metavar="N", help="candidates of a round at most [24]")
    add(
        "--patience",
        type=_positive,
        default=8,
        metavar="N",
        help="end a round after N without a better one [8]",
    )
    add("--fresh", action="store_true", help="begin a new round, even if one was cut short")
    add("--base", default="latest", metavar="PACK", help="pack to build on: its id, latest, or none [latest]")
    add("--search-seed", type=int, default=0, metavar="N", help="seed of the proposer [0]")
    add_rounds_dir(kernels)
    group = kernels.add_argument_group("publishing")
    add = group.add_argument
    add("--registry", default="", metavar="URL", help="folder or fsspec URL [the user's own]")
    add("--rollout", default="none", metavar="PORT", help="have the server on this port run what won [none]")
    add("--approver", default="", metavar="WHO", help="who approves that [the user]")
    group = kernels.add_argument_group("watching")
    add = group.add_argument
    add(
        "--watch",
        action="store_true",
        help="stay; start rounds when the workload drifts, a target is missed or the hardware is new",
    )
    add("--watch-every", type=float, default=10.0, metavar="M", help="minutes between looks [10]")
    add("--watch-budget", type=float, default=60.0, metavar="M", help="minutes of rounds a day [60]")
    add(
        "--max-decode-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="target: a decode step takes at most this",
    )
    add(
        "--max-prefill-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="target: a prefill step takes at most this",
    )
    add_flags(kernels, "engine", EngineConfig)
    kernels.epilog = f"examples:{EXAMPLES}"


def main(arguments: argparse.Namespace) -> int:
    engine = load_config(EngineConfig, vars(arguments), os.environ, {})
    if engine.quantization == "int8":
        raise UsageError(
            f"--quantization {engine.quantization}: kernels are judged on weights as they were loaded",
            hint="leave out --quantization",
        )
    if engine.pack != AUTO:
        raise UsageError("optimize builds on --base, not on --pack", hint="--base takes a pack's id")
    port = _port(arguments.rollout)
    from headrace.kernels.native.build import find_compiler

    find_compiler()  # without one no candidate can be built: said before anything is loaded
    if _is_module(arguments.model):
        _check_class(arguments.model)
        return _module(arguments, engine.threads)
    from headrace.cli.kernel_loop import KernelLoop
    from headrace.optimize.registry import current_user

    loop = KernelLoop(
        model=arguments.model,
        workload=arguments.workload,
        engine=engine,
        proposer=_proposer(arguments, engine.threads),
        wanted=_covers(arguments.proposer),
        limits=_limits(arguments),
        rounds_dir=Path(arguments.rounds_dir).expanduser() if arguments.rounds_dir else None,
        registry_url=arguments.registry,
        base=arguments.base,
        op=arguments.op,
        port=port,
        approver=arguments.approver or f"{current_user()} (optimize)",
        seed=arguments.search_seed,
        say=_say(),
    )
    loop.check_server()
    if arguments.watch:
        targets = {"decode": arguments.max_decode_ms / 1e3, "prefill": arguments.max_prefill_ms / 1e3}
        loop.watch(
            rounds=arguments.rounds,
            every_s=60 * arguments.watch_every,
            minutes_a_day=arguments.watch_budget,
            targets={phase: ceiling for phase, ceiling in targets.items() if ceiling},
        )
        return 0
    return _code(loop.run(arguments.rounds, fresh=arguments.fresh))


def _module(arguments: argparse.Namespace, threads: int | None) -> int:
    for flag, given in (("--rollout", arguments.rollout != "none"), ("--watch", arguments.watch)):
        if given:
            raise UsageError(
                f"{flag} is for a model that is served; {arguments.model} is a module of your own"
            )
    from headrace.cli.module_loop import optimize_module
    from headrace.optimize.proposers.module_search import ModuleSearch
    from headrace.optimize.registry import current_user

    ends = optimize_module(
        arguments.model,
        proposer=ModuleSearch(threads) if arguments.proposer == "search" else _proposer(arguments, threads),
        limits=_limits(arguments),
        threads=threads or 0,
        rounds=arguments.rounds,
        fresh=arguments.fresh,
        rounds_dir=Path(arguments.rounds_dir).expanduser() if arguments.rounds_dir else None,
        registry_url=arguments.registry,
        approver=arguments.approver or f"{current_user()} (optimize)",
        seed=arguments.search_seed,
        say=_say(),
    )
    return _code(ends)


def _is_module(model: str) -> bool:
    """Whether it means a module of the user's own, path.py:Class, be it without its class."""
    return model.endswith(".py") or model.rpartition(":")[0].endswith(".py")


def _check_class(model: str) -> None:
    """Raises UsageError where no class is named; its hint has those of the file, which is not run."""
    path, _, name = model.rpartition(":")
    if path.endswith(".py") and name.isidentifier():
        return
    path = path if path.endswith(".py") else model
    try:
        parsed = ast.parse(Path(path).expanduser().read_bytes())
        classes = [node.name for node in parsed.body if isinstance(node, ast.ClassDef)]
    except (OSError, SyntaxError, ValueError):
        classes = []  # whoever runs the file says what is wrong with it
    named = f"; its classes are {', '.join(classes)}" if classes else ""
    raise UsageError(
        f"{model} is a file: which of its modules is meant must be said",
        hint=f"headrace optimize kernels {path}:{classes[-1] if classes else 'CLASS'}{named}",
    )


def _code(ends: Sequence[RoundEnd]) -> int:
    """The exit code: 1 when no round brought anything and there was something to gain."""
    return 0 if any(end.outcome in ("won", "nothing_to_gain") for end in ends) else 1


def _limits(arguments: argparse.Namespace) -> Limits:
    from headrace.optimize.loop import Limits

    return Limits(
        candidates=arguments.candidates, patience=arguments.patience, minutes=max(0.0, arguments.minutes)
    )


def _covers(proposer: str) -> Callable[[Target], bool]:
    """Which targets are worth a round: a search has templates for some alone."""
    if proposer != "search":
        return lambda target: True
    from headrace.optimize.proposers.search import covers

    return covers


def _proposer(arguments: argparse.Namespace, threads: int | None) -> Proposer:
    if arguments.proposer == "agent":
        from headrace.optimize.proposers.agent import Agent

        if not arguments.agent.strip():
            raise UsageError(
                "--proposer agent needs --agent COMMAND", hint='--agent "my-agent --task task.md"'
            )
        return Agent(arguments.agent, minutes=arguments.agent_minutes)
    if arguments.proposer == "endpoint":
        from headrace.optimize.proposers.endpoint import Endpoint

        url = arguments.endpoint or f"http://127.0.0.1:{GatewayConfig().port}"
        return Endpoint(
            url,
            arguments.endpoint_model,
            api_key=os.environ.get("OPENAI_API_KEY", ""),
            max_tokens=arguments.endpoint_max_tokens,
        )
    from headrace.optimize.proposers.search import Search

    return Search(threads)


def _port(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise UsageError(f"--rollout takes the port of a running server, or none; got {text!r}")
    return int(text)


def _say() -> Callable[[str], None]:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return say


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)
