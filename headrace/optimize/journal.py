"""What a run of the loop says: line by line to people, and as Markdown in the round's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.optimize.proposal import Trial
from headrace.optimize.records import Measurement, Ratio


class Journal:
    """``say`` prints a line. Everything goes into the transcript of the round that is open, too."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._path: Path | None = None

    def open(self, path: Path, heading: str) -> None:
        """A round begins, or goes on after it was cut short."""
        again = path.exists()
        self._path = path
        self.heading(f"{heading}, going on" if again else heading)

    def heading(self, text: str) -> None:
        self._say(text)
        self._write(f"\n## {text}\n\n")

    def line(self, text: str) -> None:
        self._say(f"  {text}")
        self._write(f"- {text}\n")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A summary: aligned columns for people, a Markdown table in the transcript."""
        cells = [list(header), *(list(row) for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        self._say(title)
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self._say("  " + "  ".join(padded).rstrip())
        self._write(f"\n## {title}\n\n")
        for number, row in enumerate(cells):
            self._write("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
            if number == 0:
                self._write("|" + "---|" * len(header) + "\n")

    def _write(self, text: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)


def trial_line(number: int, trial: Trial, *, is_best: bool) -> str:
    """One candidate on one line: its number, what became of it, how it differs."""
    verdict = trial.verdict
    if not verdict.passed:
        detail = " ".join(verdict.detail.split())
        return f"{number:03d}  {verdict.reason}: {detail[:140]}"
    speed = "not timed"
    if trial.measurement is not None:
        speed = ratios_text(trial.measurement.alone)
    changed = "  ".join(f"{name}={value}" for name, value in trial.candidate.parameters.items())
    return "  ".join(
        part
        for part in (f"{number:03d}", "right", speed, "best so far" if is_best else "", changed[:120])
        if part
    )


def ratio_text(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def ratios_text(ratios: dict[str, Ratio]) -> str:
    return ", ".join(f"{name} {ratio_text(ratio)}" for name, ratio in ratios.items()) or "nothing"


def measurement_line(measurement: Measurement) -> str:
    """What decides: alone, the whole workload, and whether its tokens agree."""
    verdict = "won" if measurement.won else "no win"
    words = (
        f"{verdict}: end to end {ratios_text(measurement.end_to_end)}; alone {ratios_text(measurement.alone)}"
    )
    if measurement.agreement:
        words += f"; {measurement.agreement}"
    if measurement.limited:
        words += f"; torch's operators {measurement.limited}"
    return words if measurement.won or not measurement.detail else f"{words}; {measurement.detail}"
