"""The front door of the benchmarks: ``scripts/bench NAME [--json FILE] [flags of that bench]``.

Exit codes: 0 measured (targets may be missed: the table says so), 1 could not measure, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers import cache_root
from headrace.bench.report import render, to_json
from headrace.core.errors import HeadraceError

BENCHES = {
    "engine": "Headrace, Transformers, vLLM-CPU and llama.cpp on the same weights",
    "step": "where a decode step of 8 and of 64 sequences goes, and how much is outside kernels",
    "invariance": "what the fixed order of additions, the same bits in any batch, costs our kernels",
    "long": "a conversation of 200,000 tokens through the real server",
    "gateway": "what a request costs in our gateway and in four others",
    "routing": "every routing policy under recorded traffic, simulated, and two on real replicas",
    "split": "running decodes while long prompts arrive: one process, or prefill and decode apart",
    "cache-tiers": "conversations larger than memory, with and without the disk tier",
    "peers": "two vLLM-CPU, then two llama-servers behind us: the reuse they report against the ideal",
    "install-peers": "install the peers beside us (names limit it)",
}

MODULES = {"peers": "peers_fleet", "cache-tiers": "cache_tiers"}
"""Where a bench's file has another name than the bench."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: scripts/bench NAME [--json FILE] [flags]\n")
        print("\n".join(f"  {name:14} {summary}" for name, summary in BENCHES.items()))
        return 0
    name, *rest = argv
    if name not in BENCHES:
        close = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"benches are {', '.join(BENCHES)}"
        print(f"error: no bench {name!r}\nhint: {hint}", file=sys.stderr)
        return 2
    if name == "install-peers":
        return int(importlib.import_module("benchmarks.peers").main(rest))
    bench = importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=BENCHES[name], allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    bench.add_arguments(parser)
    arguments = parser.parse_args(rest)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        with _alone():
            report, footer = bench.run(arguments, " ".join(["scripts/bench", *argv]))
    except HeadraceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(render(report, footer=footer))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(to_json(report))
    return 0


@contextmanager
def _alone() -> Iterator[None]:
    """One bench at a time on a machine: two would measure each other."""
    path = cache_root() / "bench" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another bench is running: waiting for its end", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
