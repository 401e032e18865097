"""The roofline of one phase as an SVG: attainable rate over arithmetic intensity, both by decades."""

from __future__ import annotations

import math
from html import escape

from headrace.optimize.profile.roofline import ceilings, is_kernel
from headrace.optimize.records import OpProfile, PhaseProfile, Roofs

_WIDTH, _HEIGHT = 900, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 16, 44
_SMALLEST, _LARGEST = 4.0, 22.0
_LABELLED_SHARE = 0.02
_LABEL_WIDTH, _LABEL_HEIGHT = 110.0, 13.0


class _Frame:
    """From (FLOP per byte, GFLOP/s) to places in the drawing."""

    def __init__(self, intensities: list[float], rates: list[float]) -> None:
        self.x_low, self.x_high = _decades(intensities)
        self.y_low, self.y_high = _decades(rates)

    def x(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, rate: float) -> float:
        share = (math.log10(rate) - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def roofline_svg(phase: PhaseProfile, roofs: Roofs) -> str:
    """Empty where no op of the phase has both operations and bytes."""
    points = [op for op in phase.ops if is_kernel(op) and op.intensity > 0 and op.gflops_per_s > 0]
    if not points:
        return ""
    intensities = [op.intensity for op in points]
    rates = [op.gflops_per_s for op in points] + [rate / 1e9 for rate in roofs.gemm.values()]
    for rate in roofs.gemm.values():  # the ridges
        intensities += [rate / stream for stream in roofs.stream.values()]
    frame = _Frame(intensities, rates)
    name = escape(f"Roofline of {phase.phase}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{name}"><title>{name}</title>\n{_axes(frame)}{_roof_lines(frame, roofs, phase)}'
        f"{_points(frame, points)}</svg>"
    )


def _axes(frame: _Frame) -> str:
    low, left, right = _HEIGHT - _BOTTOM, _LEFT, _WIDTH - _RIGHT
    parts = []
    for decade in range(frame.x_low, frame.x_high + 1):
        x = frame.x(10.0**decade)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{low}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{low + 16}" text-anchor="middle">{_power(decade)}</text>'
        )
    for decade in range(frame.y_low, frame.y_high + 1):
        y = frame.y(10.0**decade)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_power(decade)}</text>'
        )
    parts.append(f'<line class="axis" x1="{left}" y1="{low}" x2="{right}" y2="{low}"/>')
    parts.append(f'<line class="axis" x1="{left}" y1="{_TOP}" x2="{left}" y2="{low}"/>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">FLOP per byte</text>')
    parts.append(
        f'<text x="14" y="{(low + _TOP) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(low + _TOP) / 2})">GFLOP/s</text>\n'
    )
    return "".join(parts)


def _roof_lines(frame: _Frame, roofs: Roofs, phase: PhaseProfile) -> str:
    """A slope for reads at the step's footprint and one for the near caches, a ceiling for each dtype."""
    parts = []
    top = max(roofs.gemm.values(), default=0.0)
    for dtype, rate in sorted(roofs.gemm.items()):
        start = rate / max(roofs.stream.values()) if roofs.stream else 10.0**frame.x_low
        parts.append(_line(frame, start, rate, 10.0**frame.x_high, rate))
        label = f"{dtype} products {rate / 1e9:,.0f} GFLOP/s"
        parts.append(
            f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{frame.y(rate / 1e9) - 5:.1f}" text-anchor="end">'
            f"{escape(label)}</text>"
        )
    own = ceilings(roofs, phase.footprint, "").stream if roofs.stream else 0.0
    for size, rate in sorted(roofs.stream.items()):
        if rate not in (own, max(roofs.stream.values())):
            continue
        low = max(10.0**frame.x_low, 10.0**frame.y_low * 1e9 / rate)
        high = top / rate if top else 10.0**frame.x_high
        if high <= low:
            continue
        parts.append(_line(frame, low, low * rate, high, high * rate))
        x, y = frame.x(low * 1.6), frame.y(low * 1.6 * rate / 1e9)
        slope = -math.degrees(math.atan2(frame.y(low * rate / 1e9) - y, x - frame.x(low)))
        label = f"reads at {size / 1e6:,.0f} MB {rate / 1e9:,.0f} GB/s"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y - 5:.1f}" '
            f'transform="rotate({slope:.1f} {x:.1f} {y - 5:.1f})">{escape(label)}</text>'
        )
    return "".join(parts) + "\n"


def _line(frame: _Frame, x1: float, rate1: float, x2: float, rate2: float) -> str:
    return (
        f'<line class="roof" x1="{frame.x(x1):.1f}" y1="{frame.y(rate1 / 1e9):.1f}" '
        f'x2="{frame.x(x2):.1f}" y2="{frame.y(rate2 / 1e9):.1f}"/>'
    )


def _points(frame: _Frame, ops: list[OpProfile]) -> str:
    """Large ones first, so that small ones lie on top; labels step down where another one is near."""
    drawn = []
    labels: list[tuple[float, float]] = []
    for op in sorted(ops, key=lambda op: -op.share):
        x, y = frame.x(op.intensity), frame.y(op.gflops_per_s)
        while any(abs(x - x2) < _LABEL_WIDTH and abs(y - y2) < _LABEL_HEIGHT for x2, y2 in labels):
            y += _LABEL_HEIGHT / 2
        if op.share >= _LABELLED_SHARE:
            labels.append((x, y))
        drawn.append(_point(frame, op, y))
    return "".join(drawn)


def _point(frame: _Frame, op: OpProfile, label_y: float) -> str:
    """A circle whose area follows the share of the step; what it is when the pointer rests on it."""
    x, y = frame.x(op.intensity), frame.y(op.gflops_per_s)
    radius = _SMALLEST + (_LARGEST - _SMALLEST) * math.sqrt(min(1.0, max(0.0, op.share)))
    roof = f", {op.roof_share * 100:.1f} % of its roof" if op.roof_share else ""
    rates = f"{op.gflops_per_s:.1f} GFLOP/s, {op.gbytes_per_s:.1f} GB/s"
    told = f"{op.path}: {op.total_s * 1e3:.3f} ms, {rates}{roof}"
    label = ""
    if op.share >= _LABELLED_SHARE:
        name = escape(op.path.rpartition("/")[2])
        label = f'<text x="{x + radius + 3:.1f}" y="{label_y + 4:.1f}">{name}</text>'
    return (
        f'<g><title>{escape(told)}</title><circle class="point {op.bound}" cx="{x:.1f}" cy="{y:.1f}" '
        f'r="{radius:.1f}"/>{label}</g>\n'
    )


def _decades(values: list[float]) -> tuple[int, int]:
    low = math.floor(math.log10(min(values)) - 0.1)
    return low, max(low + 1, math.ceil(math.log10(max(values)) + 0.15))


def _power(decade: int) -> str:
    return f"{10.0**decade:g}" if -4 < decade < 5 else f"1e{decade}"
