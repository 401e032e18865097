"""ps: show the replicas of a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec

from headrace.cli.control_client import ANSWER_TIMEOUT_S, add_port, ask
from headrace.core.control import Ps, PsReply
from headrace.core.messages import Moves
from headrace.core.routing import FleetStatus, ReplicaStatus

# A table that is piped somewhere is folded only where names are long.
PIPE_WIDTH = 120
WIDE_PIPE_WIDTH = 250
# With --wide; otherwise queue and running share a column, both times another, a breaker that is not closed
# is told beside the state, and packs below.
WIDE_COLUMNS = (
    "replica",
    "model",
    "kind",
    "state",
    "pack",
    "queue",
    "running",
    "KV %",
    "prefix\nhits %",
    "prefill\ntok/s",
    "decode\ntok/s",
    "TTFT ms\npredicted",
    "TTFT ms\nactual",
    "in\nflight",
    "rescues",
    "faults",
    "breaker",
    "restarts",
)
COLUMNS = (
    "replica",
    "model",
    "kind",
    "state",
    "running\n(queue)",
    "KV %",
    "prefix\nhits %",
    "TTFT ms\n(predicted)",
    "rescues",
)
NUM_TEXT_COLUMNS = 4
NUM_TIER_TEXT_COLUMNS = 2
# A second table where blocks move between replicas or to disk; "split" and "filling" are requests.
TIER_COLUMNS = ("replica", "role", "split", "filling", "fetched", "sent", "on disk", "disk hits", "damaged")
UNKNOWN = "-"
PACK_DIGITS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_port(parser)
    parser.add_argument("--wide", action="store_true", help="more columns, for a terminal of 180 or a pipe")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def main(arguments: argparse.Namespace) -> int:
    reply = ask(arguments, Ps(), PsReply, timeout_s=ANSWER_TIMEOUT_S)
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(reply.status)) + b"\n")
    else:
        _print(reply.status, wide=arguments.wide)
    return 0


def _print(status: FleetStatus, *, wide: bool = False) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE_PIPE_WIDTH if wide else PIPE_WIDTH)

    def table(columns: Sequence[str], num_text: int, row: Callable[[ReplicaStatus], list[str]]) -> None:
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(columns):
            made.add_column(name, justify="left" if index < num_text else "right", overflow="fold")
        for replica in status.replicas:
            made.add_row(*row(replica), style=None if replica.member.state == "ready" else "yellow")
        console.print(made)

    if status.replicas:
        if wide:
            table(WIDE_COLUMNS, NUM_TEXT_COLUMNS + 1, wide_cells)
        else:
            table(COLUMNS, NUM_TEXT_COLUMNS, cells)
    elif not status.scaled_to_zero:
        console.print("no replicas")
    for model in status.scaled_to_zero:
        line = f"{model}: 0 replicas, requests get a 503; to start one: headrace scale 1 --model {model}"
        console.print(line, markup=False, soft_wrap=True)
    if any(one.moves is not None or one.member.endpoint.role != "unified" for one in status.replicas):
        table(TIER_COLUMNS, NUM_TIER_TEXT_COLUMNS, tier_cells)
    gateways = f", gateways: {', '.join(status.gateways)}" if status.gateways else ""
    console.print(
        f"policy {status.policy}, waiting in the router: {status.num_queued}{gateways}", markup=False
    )
    for line in notes(status):
        console.print(line, markup=False, soft_wrap=True)


def cells(replica: ReplicaStatus) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    row = dict(zip(WIDE_COLUMNS, wide_cells(replica), strict=True))
    return [
        row["replica"],
        row["model"],
        row["kind"],
        row["state"] if replica.breaker == "closed" else f"{row['state']}, breaker {replica.breaker}",
        _pair(row["running"], row["queue"]),
        row["KV %"],
        row["prefix\nhits %"],
        _pair(row["TTFT ms\nactual"], row["TTFT ms\npredicted"]),
        row["rescues"],
    ]


def wide_cells(replica: ReplicaStatus) -> list[str]:
    """One row of the table with --wide, in the order of WIDE_COLUMNS."""
    endpoint, capabilities = replica.member.endpoint, replica.member.capabilities
    kind = capabilities.kind if capabilities is not None else endpoint.kind
    load = capabilities is not None and capabilities.load
    return [
        endpoint.replica_id,
        endpoint.model,
        (kind or "unknown") + (", overflow" if endpoint.overflow else ""),
        replica.member.state,
        replica.pack[:PACK_DIGITS] or ("none" if kind == "headrace" else UNKNOWN),
        str(replica.num_waiting) if load else UNKNOWN,
        str(replica.num_running) if load else UNKNOWN,
        f"{100 * replica.kv_cache_usage:.1f}" if load else UNKNOWN,
        _share(replica.prefix_cache_hits, replica.prefix_cache_queries),
        _number(replica.prefill_rate),
        _number(replica.decode_rate),
        _milliseconds(replica.predicted_ttft_s),
        _milliseconds(replica.ttft_s),
        str(replica.num_in_flight),
        str(replica.num_rescued),
        str(replica.num_faults),
        replica.breaker,
        str(endpoint.num_restarts),
    ]


def tier_cells(replica: ReplicaStatus) -> list[str]:
    """One row of the second table, in the order of TIER_COLUMNS; counts are blocks."""
    moves = replica.moves or Moves()
    counts = (
        moves.num_filling,
        moves.fetched_blocks,
        moves.sent_blocks,
        moves.disk_blocks,
        moves.disk_hit_blocks,
        moves.damaged_blocks,
    )
    known = replica.moves is not None
    return [
        replica.member.endpoint.replica_id,
        replica.member.endpoint.role,
        f"{replica.num_split:,}",
        *(f"{count:,}" if known else UNKNOWN for count in counts),
    ]


def notes(status: FleetStatus) -> list[str]:
    """What the table has no room for: a replica's own words, and what its interface cannot do."""
    lines = []
    for replica in status.replicas:
        name = replica.member.endpoint.replica_id
        if replica.note:
            lines.append(f"{name}: {replica.note}")
        if replica.pack:
            lines.append(f"{name}: runs pack {replica.pack[:PACK_DIGITS]}")
        capabilities = replica.member.capabilities
        lines += [f"{name}: {limit}" for limit in (capabilities.limits if capabilities is not None else [])]
    return lines


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else UNKNOWN


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else 1000 * seconds)


def _pair(first: str, second: str) -> str:
    return UNKNOWN if first == second == UNKNOWN else f"{first} ({second})"
