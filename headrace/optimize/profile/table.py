"""A profile as tables for a terminal, and the words that the HTML page uses as well."""

from __future__ import annotations

from headrace.core.words import count
from headrace.optimize.profile.roofline import depth, is_kernel
from headrace.optimize.records import KernelProfile, OpProfile, PhaseProfile

# A table that is piped somewhere is not folded.
PIPE_WIDTH = 200
COLUMNS = (
    "op",
    "rows",
    "calls",
    "self ms",
    "median",
    "±",
    "total ms",
    "self %",
    "MB",
    "FLOP/B",
    "GB/s",
    "GFLOP/s",
    "roof %",
    "bound",
    "recover ms",
    "gain",
)
UNKNOWN = "-"
_SHOWN_SHARE = 0.0005
_ABOVE_ROOF = 1.05
FOOTNOTES = (
    "Times are per step: the mean over the middle half of a step's runs, so that they add up, and over the "
    "phase's steps; median and ± (interquartile range) are of self time over all runs.",
    "self: without the ops it calls; total and what follows: with them. MB: the least that must be moved, "
    "weights and cache included.",
    "roof: the measured rate that bounds the op; for what streams weights or cache that of reads at the "
    "step's own footprint, for products that of the dtype their weights are stored in (blocks: int8). bound "
    "overhead: more than ten times slower than any roof explains.",
    "recover: what a step would lose if the op ran at its roof; gain: the whole step's speed-up then.",
)


def op_cells(op: OpProfile) -> list[str]:
    """One row, in the order of COLUMNS."""
    roofed = op.roof_share > 0
    return [
        "  " * depth(op) + op.path.rpartition("/")[2],
        _rows(op),
        f"{op.calls_per_step:,.4g}",
        f"{op.self_s * 1e3:.3f}",
        f"{op.self_median_s * 1e3:.3f}",
        f"{op.self_spread_s * 1e3:.3f}",
        f"{op.total_s * 1e3:.3f}",
        f"{op.share * 100:.1f}",
        f"{op.bytes / 1e6:,.2f}" if op.bytes else UNKNOWN,
        f"{op.intensity:.2f}" if op.flops and op.bytes else UNKNOWN,
        f"{op.gbytes_per_s:.1f}" if op.bytes else UNKNOWN,
        f"{op.gflops_per_s:.1f}" if op.flops else UNKNOWN,
        f"{op.roof_share * 100:.1f}" if roofed else UNKNOWN,
        op.bound,
        f"{op.recoverable_s * 1e3:.3f}" if roofed else UNKNOWN,
        f"{op.end_to_end_gain:.2f}x" if roofed else UNKNOWN,
    ]


def totals(phase: PhaseProfile) -> list[tuple[str, float]]:
    """What a step's time is made of, in seconds: ops, what stands around them, and what is left."""
    kernels = sum(op.self_s for op in phase.ops if is_kernel(op))
    around = sum(op.self_s for op in phase.ops if not is_kernel(op))
    return [("ops", kernels), ("around them", around), ("unnamed", phase.unnamed_s)]


def title(phase: PhaseProfile) -> str:
    text = (
        f"{phase.phase}: {count(phase.num_steps, 'step')} of {count(phase.rows, 'row')} (median), "
        f"{phase.step_s * 1e3:.3f} ms"
    )
    if phase.footprint:
        text += f", {phase.footprint / 1e6:,.1f} MB of weights and cache"
    return text


def check(phase: PhaseProfile) -> str:
    """The sums, against the clock on the wall."""
    step = phase.step_s
    parts = " + ".join(f"{name} {s * 1e3:.3f} ms ({_percent(s, step)})" for name, s in totals(phase))
    if not phase.unprofiled_step_s:
        return f"sum: {parts} = {step * 1e3:.3f} ms"
    whole = sum(s for _, s in totals(phase))
    return (
        f"sum: {parts} = {whole * 1e3:.3f} ms; without timers {phase.unprofiled_step_s * 1e3:.3f} ms "
        f"({_percent(whole - phase.unprofiled_step_s, phase.unprofiled_step_s, sign=True)}); "
        f"timers cost {phase.instrument_s * 1e3:.3f} ms, taken off"
    )


def roof_lines(profile: KernelProfile) -> list[str]:
    roofs = profile.roofs
    if not roofs.stream and not roofs.gemm:
        return [f"roofs: {roofs.method}"]
    stream = ", ".join(
        f"{size / 1e6:,.0f} MB {rate / 1e9:.1f}" for size, rate in sorted(roofs.stream.items())
    )
    gemm = ", ".join(f"{dtype} {rate / 1e9:,.0f}" for dtype, rate in sorted(roofs.gemm.items()))
    return [f"roofs: reads at {stream} GB/s; products {gemm} GFLOP/s ({roofs.method})"]


def caveats(profile: KernelProfile) -> list[str]:
    """What makes the figures less than they seem."""
    ops = [op for phase in profile.phases for op in phase.ops]
    above = [op for op in ops if op.roof_share > _ABOVE_ROOF and op.share > _ABOVE_ROOF - 1]
    if not above:
        return []
    worst = max(above, key=lambda op: op.roof_share)
    return [
        f"{worst.path} reached {worst.roof_share * 100:.0f} % of its roof: the machine was busier while the "
        "roofs were measured than during the run. Repeat on a quiet machine."
    ]


def recipe_line(profile: KernelProfile) -> str:
    return "recipe: " + "; ".join(f"{name}: {value}" for name, value in profile.recipe.items())


def headline(profile: KernelProfile) -> str:
    parts = [profile.model, profile.workload, profile.hardware, profile.dtype]
    if profile.threads:
        parts.append(count(profile.threads, "thread"))
    parts.append(profile.source)
    if profile.packs:
        parts.append(f"packs {', '.join(profile.packs)}")
    return " · ".join(part for part in parts if part)


def print_profile(profile: KernelProfile) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    console.print(headline(profile), markup=False)
    for phase in profile.phases:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title(phase), title_justify="left")
        for index, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if index == 0 or name == "bound" else "right", no_wrap=True)
        shown = [op for op in phase.ops if op.total_s >= _SHOWN_SHARE * phase.step_s]
        for op in shown:
            table.add_row(*op_cells(op), style=None if is_kernel(op) else "dim")
        share = _percent(phase.unnamed_s, phase.step_s).removesuffix(" %")
        unnamed = ["unnamed", "", "", f"{phase.unnamed_s * 1e3:.3f}", "", "", "", share]
        table.add_row(*unnamed, style="dim")
        console.print(table)
        if len(shown) < len(phase.ops):
            left_out = f"{len(phase.ops) - len(shown)} more below {100 * _SHOWN_SHARE:g} % of the step each"
            console.print(left_out, markup=False, style="dim")
        console.print(check(phase), markup=False, soft_wrap=True)
    for line in caveats(profile):
        console.print(f"note: {line}", markup=False, style="yellow", soft_wrap=True)
    notes = [*roof_lines(profile), *FOOTNOTES]
    if profile.recipe:
        notes.append(recipe_line(profile))
    for line in notes:
        console.print(line, markup=False, style="dim", soft_wrap=True)


def _rows(op: OpProfile) -> str:
    """Of the shapes: one number, or the range of what occurred."""
    rows = [shape.rows for shape in op.shapes]
    if not rows or not max(rows):
        return UNKNOWN
    return str(rows[0]) if min(rows) == max(rows) else f"{min(rows)}–{max(rows)}"


def _percent(part: float, whole: float, *, sign: bool = False) -> str:
    return f"{100 * part / whole if whole else 0.0:{'+' if sign else ''}.1f} %"
