"""A profile as one HTML page that needs nothing else: the roofline as a drawing, and the tables."""

from __future__ import annotations

from html import escape

from headrace.optimize.profile.roofline import depth, is_kernel
from headrace.optimize.profile.roofline_plot import roofline_svg
from headrace.optimize.profile.table import (
    COLUMNS,
    FOOTNOTES,
    UNKNOWN,
    caveats,
    check,
    headline,
    op_cells,
    recipe_line,
    roof_lines,
    title,
)
from headrace.optimize.records import KernelProfile, OpProfile, PhaseProfile

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --dim: #667; --line: #ccd; --page: #fff; --bar: #9cc4e4;
  --memory: #1f77b4; --compute: #d1495b; --overhead: #b8860b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #99a; --line: #445; --page: #14181f;
  --bar: #2f5d80; --memory: #6db3e8; --compute: #f0808c; --overhead: #e0b84c; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
p, li { max-width: 70rem; } .dim { color: var(--dim); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--dim); } td:first-child, th:first-child { text-align: left; }
td.share { background: linear-gradient(90deg, var(--bar) var(--share), transparent var(--share)); }
tr.engine td { color: var(--dim); }
.memory { color: var(--memory); } .compute { color: var(--compute); } .overhead { color: var(--overhead); }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--ink); } svg .grid { stroke: var(--line); }
svg .roof { stroke: var(--dim); fill: none; }
svg .tick { fill: var(--dim); } svg .point { fill-opacity: .65; stroke-width: 1.2; }
svg .memory { fill: var(--memory); stroke: var(--memory); }
svg .compute { fill: var(--compute); stroke: var(--compute); }
svg .overhead { fill: var(--overhead); stroke: var(--overhead); }
summary { cursor: pointer; }
"""
_MOST_SHAPES = 12


def html_page(profile: KernelProfile) -> str:
    name = escape(f"{profile.model} {profile.workload}")
    phases = "".join(_phase(profile, phase) for phase in profile.phases)
    notes = "".join(f"<li>{escape(note)}</li>" for note in FOOTNOTES)
    roofs = "".join(f"<p>{escape(line)}</p>" for line in (*roof_lines(profile), *caveats(profile)))
    recipe = f'<p class="dim">{escape(recipe_line(profile))}</p>' if profile.recipe else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Profile: {name}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Kernel profile: {name}</h1>\n"
        f'<p>{escape(headline(profile))}<br><span class="dim">{escape(profile.created)} · revision '
        f"{escape(profile.revision) or UNKNOWN}</span></p>\n{roofs}\n{phases}\n<h2>How to read this</h2>"
        f'<ul class="dim">{notes}</ul>\n{recipe}</body></html>\n'
    )


def _phase(profile: KernelProfile, phase: PhaseProfile) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(_row(op) for op in phase.ops)
    share = phase.unnamed_s / phase.step_s if phase.step_s else 0.0
    rest = len(COLUMNS) - 8
    rows += (
        f'<tr class="engine"><td>unnamed</td><td></td><td></td><td>{phase.unnamed_s * 1e3:.3f}</td><td></td>'
        f"<td></td><td></td>{_share(share)}{'<td></td>' * rest}</tr>"
    )
    return (
        f"<section><h2>{escape(title(phase))}</h2>\n{roofline_svg(phase, profile.roofs)}\n"
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>\n'
        f"<p>{escape(check(phase))}</p>\n{_shapes(phase)}{_layers(phase)}</section>\n"
    )


def _row(op: OpProfile) -> str:
    cells = op_cells(op)
    parts = []
    for column, cell in zip(COLUMNS, cells, strict=True):
        if column == "op":
            parts.append(
                f'<td style="padding-left:{0.5 + 1.2 * depth(op):.1f}rem" title="{escape(op.path)}">'
                f"{escape(cell.strip())}</td>"
            )
        elif column == "self %":
            parts.append(_share(op.share))
        elif column == "bound":
            parts.append(f'<td class="{op.bound if is_kernel(op) else ""}">{escape(cell)}</td>')
        else:
            parts.append(f"<td>{escape(cell)}</td>")
    kind = "op" if is_kernel(op) else "engine"
    return f'<tr class="{kind}">{"".join(parts)}</tr>'


def _share(share: float) -> str:
    width = min(100.0, max(0.0, 100 * share))
    return f'<td class="share" style="--share:{width:.1f}%">{share * 100:.1f}</td>'


def _shapes(phase: PhaseProfile) -> str:
    """Every shape that occurred, with how often."""
    rows = []
    for op in phase.ops:
        for shape in op.shapes[:_MOST_SHAPES]:
            dims = ", ".join(f"{name} {size}" for name, size in shape.dims.items())
            rows.append(
                f"<tr><td>{escape(op.path)}</td><td>{shape.calls_per_step:,.4g}</td><td>{shape.rows}</td>"
                f"<td>{shape.context or UNKNOWN}</td><td>{escape(shape.dtype)}</td>"
                f"<td>{escape(dims)}</td></tr>"
            )
        if len(op.shapes) > _MOST_SHAPES:
            more = len(op.shapes) - _MOST_SHAPES
            rows.append(f'<tr class="engine"><td>{escape(op.path)}</td><td>{more} more</td></tr>')
    heads = "".join(f"<th>{name}</th>" for name in ("op", "calls", "rows", "context", "dtype", "dims"))
    return (
        '<details><summary>Shapes as they occurred</summary><div class="wide"><table><thead><tr>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>\n"
    )


def _layers(phase: PhaseProfile) -> str:
    """Total time of each layer, where the model has layers."""
    whole = next((op for op in phase.ops if op.op == "decoder_layer" and op.layer_s), None)
    if whole is None:
        return ""
    most = max(whole.layer_s)
    rows = "".join(
        f'<tr><td>{layer}</td><td class="share" style="--share:{100 * spent / most:.1f}%;width:12rem">'
        f"{spent * 1e3:.3f}</td></tr>"
        for layer, spent in zip(whole.layers, whole.layer_s, strict=True)
    )
    return (
        "<details><summary>Layers</summary><table><thead><tr><th>layer</th><th>total ms</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></details>\n"
    )
