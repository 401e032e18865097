"""What `bench cache-tiers` measured, turned into rows with the bounds that were set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.served import Metrics
from headrace.bench.metrics import interquartile_range, percentile
from headrace.bench.report import Row, Target, make_row

TTFT_TARGET = Target("ratio", "<=", 0.5)
TIMES_MEMORY_TARGET = Target("value", ">=", 4.0)
NOTHING_LEFT = Target("value", "<=", 0.0)


@dataclass
class Pass:
    """One server's life; TTFTs in seconds, tokens and bytes of this life alone.

    ``files_in_page_cache`` were left there after a drop, over all drops.
    """

    memory_bytes: int
    first: list[float] = field(default_factory=list)
    returning: list[float] = field(default_factory=list)
    conversation_bytes: int = 0
    files_in_page_cache: int = 0
    prompt_tokens: float = 0.0
    memory_tokens: float = 0.0
    disk_tokens: float = 0.0
    disk_bytes: float = 0.0
    read_bytes: float = 0.0
    read_s: float = 0.0
    written_bytes: float = 0.0
    refused_blocks: float = 0.0
    damaged_blocks: float = 0.0

    @property
    def ttfts(self) -> list[float]:
        return [*self.first, *self.returning]

    @property
    def hit_rate(self) -> float:
        return (self.memory_tokens + self.disk_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    def count(self, before: Metrics, after: Metrics, block_size: int) -> None:
        """Takes over what the server counted between two readings."""

        def grown(name: str) -> float:
            return after.total(name) - before.total(name)

        self.prompt_tokens = grown("prefix_cache_queries_total")
        self.disk_tokens = grown("kv_disk_hit_blocks_total") * block_size
        self.memory_tokens = grown("prefix_cache_hits_total") - self.disk_tokens
        self.disk_bytes = after.total("kv_disk_bytes")
        self.read_bytes = grown("kv_disk_read_bytes_total")
        self.read_s = grown("kv_disk_read_seconds_total")
        self.written_bytes = grown("kv_disk_written_bytes_total")
        self.refused_blocks = grown("kv_disk_refused_blocks_total")
        self.damaged_blocks = grown("kv_damaged_blocks_total")


@dataclass
class TiersRun:
    """By side, ``with`` and ``without``; one pass a repeat."""

    main: dict[str, list[Pass]] = field(default_factory=dict)
    restart: dict[str, list[Pass]] = field(default_factory=dict)


def rows_of(run: TiersRun) -> list[Row]:
    """The main pass, the pass after the restart, then what the tier did."""
    rows = [
        make_row(
            "conversations_over_memory",
            min(one.conversation_bytes / one.memory_bytes for one in run.main["with"]),
            "",
            target=TIMES_MEMORY_TARGET,
            note="KV of all conversations at the end of the main pass, over the memory for blocks",
        )
    ]
    for name, passes in (("main", run.main), ("restart", run.restart)):
        ours, theirs = passes["with"], passes["without"]
        rows += _ttft_rows(name, ours, theirs)
        rows += _tier_rows(name, ours, theirs)
    return rows


def short(one: Pass) -> str:
    rate = one.read_bytes / one.read_s / 1e6 if one.read_s else 0.0
    return (
        f"TTFT mean {_mean(one.ttfts):.2f} s, of returning turns {_mean(one.returning):.2f} s; hits "
        f"{100 * one.hit_rate:.0f} % (disk {100 * _share(one, one.disk_tokens):.0f} %), read "
        f"{one.read_bytes / 1e6:.0f} MB at {rate:.0f} MB/s"
    )


def _ttft_rows(name: str, ours: Sequence[Pass], theirs: Sequence[Pass]) -> list[Row]:
    all_ours, all_theirs = ([ttft for one in side for ttft in one.ttfts] for side in (ours, theirs))
    rows = [
        _beside(f"{name}.ttft_mean", _mean(all_ours), _mean(all_theirs), all_ours, all_theirs, TTFT_TARGET)
    ]
    for q in (50, 99):
        rows.append(
            _beside(
                f"{name}.ttft_p{q}", percentile(all_ours, q), percentile(all_theirs, q), all_ours, all_theirs
            )
        )
    back_ours, back_theirs = ([ttft for one in side for ttft in one.returning] for side in (ours, theirs))
    rows.append(
        _beside(f"{name}.ttft_mean.returning", _mean(back_ours), _mean(back_theirs), back_ours, back_theirs)
    )
    return rows


def _tier_rows(name: str, ours: Sequence[Pass], theirs: Sequence[Pass]) -> list[Row]:
    def mean_of(side: Sequence[Pass], attribute: str) -> float:
        return _mean([float(getattr(one, attribute)) for one in side])

    def hits(row: str, attribute: str) -> Row:
        mine, peers = ([_share(one, getattr(one, attribute)) for one in side] for side in (ours, theirs))
        return _beside(f"{name}.hits.{row}", _mean(mine), _mean(peers), mine, peers, unit="")

    read_s = sum(one.read_s for one in ours)
    rate = sum(one.read_bytes for one in ours) / read_s / 1e6 if read_s else math.nan
    rates = [one.read_bytes / one.read_s / 1e6 for one in ours if one.read_s]
    return [
        hits("memory", "memory_tokens"),
        hits("disk", "disk_tokens"),
        make_row(f"{name}.disk.bytes", mean_of(ours, "disk_bytes") / 1e6, "MB"),
        make_row(f"{name}.disk.written", mean_of(ours, "written_bytes") / 1e6, "MB"),
        make_row(f"{name}.disk.read", mean_of(ours, "read_bytes") / 1e6, "MB"),
        make_row(
            f"{name}.disk.read_rate",
            rate,
            "MB/s",
            spread=interquartile_range(rates),
            note="of one reading thread, checks included",
        ),
        make_row(f"{name}.disk.refused_blocks", mean_of(ours, "refused_blocks"), ""),
        make_row(f"{name}.disk.damaged_blocks", mean_of(ours, "damaged_blocks"), ""),
        make_row(
            f"{name}.files_left_in_page_cache",
            float(sum(one.files_in_page_cache for one in ours)),
            "",
            target=NOTHING_LEFT,
            note="after the drops, before the turns, over all turns",
        ),
    ]


def _beside(
    id: str,
    value: float,
    peer_value: float,
    values: Sequence[float],
    peer_values: Sequence[float],
    target: Target | None = None,
    *,
    unit: str = "s",
) -> Row:
    return make_row(
        id,
        value,
        unit,
        spread=interquartile_range(values),
        peer="without the tier",
        peer_value=peer_value,
        peer_spread=interquartile_range(peer_values),
        target=target,
    )


def _share(one: Pass, tokens: float) -> float:
    return tokens / one.prompt_tokens if one.prompt_tokens else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
