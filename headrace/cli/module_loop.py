"""`headrace optimize kernels path.py:Class`, wired: the loop's stages for a user's own module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.optimize.journal import Journal
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.keys import Keys
from headrace.optimize.loop import Limits, Loop
from headrace.optimize.modules.host import ModuleHost
from headrace.optimize.modules.source import absolute
from headrace.optimize.modules.stages import ModuleStages
from headrace.optimize.proposal import Proposer
from headrace.optimize.proposers.module_search import ModuleSearch
from headrace.optimize.registry import Registry
from headrace.optimize.rounds import RoundEnd, RoundStore

WORKLOAD = "get_inputs()"


def optimize_module(
    name: str,
    *,
    proposer: Proposer,
    limits: Limits,
    threads: int,
    rounds: int,
    fresh: bool,
    rounds_dir: Path | None,
    registry_url: str,
    approver: str,
    seed: int,
    say: Callable[[str], None],
) -> list[RoundEnd]:
    """Runs rounds on one module, which stays open in a process of its own meanwhile."""
    name = absolute(name)
    keys = Keys()
    registry = Registry(registry_url, keys=keys)
    with ModuleHost(name, threads=threads) as host:
        options = JudgeOptions(threads=threads)
        # a search tries its templates once; others may go on from what they have
        once = isinstance(proposer, ModuleSearch)
        stages = ModuleStages(
            name, host, registry, keys, approver=approver, options=options, once=once
        ).stages()
        loop = Loop(
            RoundStore(rounds_dir),
            stages,
            proposer,
            Journal(say),
            model=name,
            workload=WORKLOAD,
            limits=limits,
            seed=seed,
        )
        ends = loop.run(rounds, fresh=fresh)
    for end in ends:
        if end.pack:
            say(f"in your program: headrace.optimize.modules.load({str(registry.fetch(end.pack))!r}, module)")
    return ends
