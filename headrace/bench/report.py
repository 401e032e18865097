"""A bench's result: rows with their peers and targets, as a table for people and as JSON.

A row's ``ratio`` is ``value / peer_value``. A target is the bound that an issue stated; a row keeps it
whether it is met or not, and a figure that could not be measured meets nothing.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class Target(msgspec.Struct, frozen=True, omit_defaults=False):
    """``of`` names what is bounded: the row's value, or its ratio to the peer."""

    of: Literal["value", "ratio"]
    op: Literal["<", "<=", ">=", ">"]
    bound: float

    def __str__(self) -> str:
        return f"{self.op} {self.bound:g}{'x' if self.of == 'ratio' else ''}"

    def holds(self, figure: float) -> bool:
        if self.op == "<":
            return figure < self.bound
        if self.op == "<=":
            return figure <= self.bound
        if self.op == ">=":
            return figure >= self.bound
        return figure > self.bound


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, perhaps beside a peer's. ``spread`` is an interquartile range in the figure's unit."""

    id: str
    value: float | None
    unit: str
    spread: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    peer_spread: float | None = None
    ratio: float | None = None
    target: Target | None = None
    met: bool | None = None
    note: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``recipe`` says how to get the figures again: command, commit, device, workload, repetitions."""

    name: str
    recipe: dict[str, str]
    rows: list[Row]


def make_row(
    id: str,
    value: float | None,
    unit: str,
    *,
    spread: float | None = None,
    peer: str | None = None,
    peer_value: float | None = None,
    peer_spread: float | None = None,
    target: Target | None = None,
    note: str = "",
) -> Row:
    """A row with its ratio and verdict worked out; a NaN counts as not measured."""
    value, peer_value = _known(value), _known(peer_value)
    ratio = value / peer_value if value is not None and peer_value else None
    met = None
    if target is not None:
        figure = value if target.of == "value" else ratio
        met = figure is not None and target.holds(figure)
    return Row(
        id=id,
        value=value,
        unit=unit,
        spread=_known(spread),
        peer=peer,
        peer_value=peer_value,
        peer_spread=_known(peer_spread),
        ratio=ratio,
        target=target,
        met=met,
        note=note,
    )


def to_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def render(report: Report, *, footer: tuple[str, ...] = ()) -> str:
    """The table for people: recipe, rows, how many targets were met, footer."""
    header = ("", "value", "±IQR", "unit", "peer", "peer's", "±IQR", "ratio", "target", "met")
    cells = [header, *(_cells(row) for row in report.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    left_aligned = {0, 3, 4}
    lines = [f"bench {report.name}"]
    lines += [f"  {key}: {text}" for key, text in report.recipe.items()]
    lines.append("")
    for number, line in enumerate(cells):
        parts = (
            cell.ljust(width) if column in left_aligned else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join(parts).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    bound = [row for row in report.rows if row.target is not None]
    missed = [row for row in bound if not row.met]
    lines += ["", f"targets met: {len(bound) - len(missed)} of {len(bound)}"]
    lines += [f"  NOT MET  {row.id}: {_verdict(row)}" for row in missed]
    for note in dict.fromkeys(row.note for row in report.rows if row.note):
        ids = [row.id for row in report.rows if row.note == note]
        lines.append(f"  note     {ids[0]}{f' and {len(ids) - 1} more' if ids[1:] else ''}: {note}")
    lines += [f"  {line}" for line in footer]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.id,
        figure(row.value),
        figure(row.spread),
        row.unit,
        row.peer or "",
        figure(row.peer_value),
        figure(row.peer_spread),
        "" if row.ratio is None else f"{row.ratio:.2f}x",
        "" if row.target is None else str(row.target),
        "" if row.met is None else ("yes" if row.met else "NO"),
    )


def _verdict(row: Row) -> str:
    assert row.target is not None
    measured = row.value if row.target.of == "value" else row.ratio
    if measured is None:
        return f"{row.target}, not measured"
    return f"{row.target}, measured {measured:.3g}"


def figure(value: float | None) -> str:
    """Three or four significant digits, without exponents where people read tokens and seconds."""
    if value is None:
        return ""
    if value != 0 and abs(value) < 0.001:
        return f"{value:.2e}"
    digits = 0 if abs(value) >= 1000 else max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
