from __future__ import annotations

import json
import math

import pytest

from headrace.bench.report import Report, Target, figure, make_row, render, to_json

KEYS = {
    "id",
    "value",
    "unit",
    "spread",
    "peer",
    "peer_value",
    "peer_spread",
    "ratio",
    "target",
    "met",
    "note",
}


def report() -> Report:
    return Report(
        name="sample",
        recipe={"command": "scripts/bench sample", "commit": "abc"},
        rows=[
            make_row(
                "m/tg128/p",
                130.0,
                "tok/s",
                spread=2.0,
                peer="p",
                peer_value=100.0,
                target=Target("ratio", ">=", 1.3),
            ),
            make_row("m/load", 3.5, "s", target=Target("value", "<", 3.0)),
            make_row(
                "m/pp512/q",
                50.0,
                "tok/s",
                peer="q",
                target=Target("ratio", ">=", 0.9),
                note="not installed",
            ),
            make_row("m/memory", 1.25, "GiB"),
        ],
    )


def test_json_has_every_field_of_every_row() -> None:
    data = json.loads(to_json(report()))
    assert set(data) == {"name", "recipe", "rows"}
    assert all(set(row) == KEYS for row in data["rows"])
    first, load, absent, plain = data["rows"]
    assert first["ratio"] == pytest.approx(1.3) and first["met"] is True
    assert first["target"] == {"of": "ratio", "op": ">=", "bound": 1.3}
    assert load["met"] is False and load["ratio"] is None
    assert absent["met"] is False and absent["peer_value"] is None
    assert plain["target"] is None and plain["met"] is None


@pytest.mark.parametrize(
    ("op", "bound", "figure", "holds"),
    [
        ("<", 3.0, 3.0, False),
        ("<=", 3.0, 3.0, True),
        (">=", 1.3, 1.29, False),
        (">=", 1.3, 1.3, True),
        (">", 1.0, 1.0, False),
    ],
)
def test_bounds(op: str, bound: float, figure: float, holds: bool) -> None:
    assert Target("value", op, bound).holds(figure) is holds  # type: ignore[arg-type]


def test_what_was_not_measured_meets_nothing() -> None:
    row = make_row("x", math.nan, "s", target=Target("value", "<", 1.0))
    assert row.value is None and row.met is False
    assert b"NaN" not in to_json(Report(name="n", recipe={}, rows=[row]))


def test_table_shows_misses_recipe_and_footer() -> None:
    text = render(report(), footer=("TTFT: defined",))
    assert "command: scripts/bench sample" in text
    assert "targets met: 1 of 3" in text
    assert "NOT MET  m/load: < 3, measured 3.5" in text
    assert "NOT MET  m/pp512/q: >= 0.9x, not measured" in text
    assert "not installed" in text and "TTFT: defined" in text
    lines = text.splitlines()
    header = next(line for line in lines if "target" in line)
    row = next(line for line in lines if line.startswith("m/tg128/p"))
    # Right-aligned columns end where their heading ends.
    assert row[: header.index("value") + len("value")].rstrip().endswith("130")
    assert "1.30x" in row and ">= 1.3x" in row and row.endswith("yes")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0, "0"), (1234.5, "1,234"), (12.345, "12.3"), (0.01234, "0.0123"), (2e-5, "2.00e-05")],
)
def test_figures_read_easily(value: float | None, text: str) -> None:
    assert figure(value) == text
