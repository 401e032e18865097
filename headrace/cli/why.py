"""why: show how the router of a running server decided about a request."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from headrace.cli.control_client import ANSWER_TIMEOUT_S, add_port, ask
from headrace.cli.ps import WIDE_PIPE_WIDTH
from headrace.core.control import Why, WhyReply
from headrace.core.errors import NotFoundError
from headrace.core.routing import Candidate, Decision

COLUMNS = ("replica", "score", "TTFT ms", "cached", "of it disk", "fetched", "fill ms", "queued tokens",
           "in flight", "running", "KV %", "")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the answer's x-request-id, or its id")
    add_port(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def main(arguments: argparse.Namespace) -> int:
    reply = ask(arguments, Why(arguments.request_id), WhyReply, timeout_s=ANSWER_TIMEOUT_S)
    if not reply.decisions:
        raise NotFoundError(
            f"nothing is known of request {arguments.request_id!r}",
            hint="the router remembers the latest requests; the id stands in the header x-request-id",
        )
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(reply.decisions)) + b"\n")
        return 0
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE_PIPE_WIDTH)
    for decision in reply.decisions:
        _print(console, decision)
    return 0


def _print(console: object, decision: Decision) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    console.print(heading(decision), markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if 0 < index < len(COLUMNS) - 1 else "left", overflow="fold")
    for candidate in sorted(decision.candidates, key=lambda one: (bool(one.excluded), one.score)):
        chosen = candidate.replica_id == decision.chosen
        table.add_row(*cells(candidate, chosen=chosen), style="bold" if chosen else None)
    console.print(table)
    console.print(ending(decision), markup=False, soft_wrap=True)


def heading(decision: Decision) -> str:
    """Which request it was, when, and what was chosen for it."""
    at = time.strftime("%H:%M:%S", time.localtime(decision.at))
    again = f", attempt {decision.attempt + 1}" if decision.attempt else ""
    by = f", its prompt computed by {decision.prefill_replica}" if decision.prefill_replica else ""
    split = f"\n{decision.split}" if decision.split else ""
    return (
        f"{decision.caller_id or decision.request_id} ({decision.request_id}): {decision.model}, "
        f"{decision.num_prompt_tokens:,} prompt tokens, at {at}{again}\n"
        f"{decision.policy} chose {decision.chosen}{by}: {decision.reason}{split}"
    )


def cells(candidate: Candidate, *, chosen: bool) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    if candidate.excluded:
        return [candidate.replica_id, *[""] * (len(COLUMNS) - 2), candidate.excluded]
    return [
        candidate.replica_id,
        f"{candidate.score:.4g}",
        f"{1000 * candidate.ttft_s:,.1f}",
        f"{candidate.num_cached_tokens:,}",
        f"{candidate.num_disk_tokens:,}",
        f"{candidate.num_fetched_tokens:,}",
        f"{1000 * candidate.fill_s:,.1f}",
        f"{candidate.num_queued_tokens:,}",
        str(candidate.num_in_flight),
        str(candidate.num_running),
        f"{100 * candidate.kv_cache_usage:.1f}",
        "chosen" if chosen else "",
    ]


def ending(decision: Decision) -> str:
    """What came of it, so far as is known."""
    predicted = next((one for one in decision.candidates if one.replica_id == decision.chosen), None)
    words = [f"waited {1000 * decision.queue_s:,.0f} ms in the router"]
    if decision.ttft_s is not None:
        words.append(f"first token after {1000 * decision.ttft_s:,.0f} ms")
        if predicted is not None:
            words[-1] += f" (predicted {1000 * predicted.ttft_s:,.0f} ms)"
    if decision.num_cached_tokens is not None:
        words.append(f"{decision.num_cached_tokens:,} tokens from the cache")
        if predicted is not None:
            words[-1] += f" (predicted {predicted.num_cached_tokens:,})"
    if decision.num_disk_tokens:
        words.append(f"{decision.num_disk_tokens:,} of them from disk")
    if decision.num_fetched_tokens:
        words.append(f"{decision.num_fetched_tokens:,} tokens fetched from {decision.prefill_replica}")
    if decision.fill_s:
        words.append(f"waited {1000 * decision.fill_s:,.0f} ms for blocks")
    words.append(decision.outcome.replace("_", " ") if decision.outcome else "still running")
    return ", ".join(words)
