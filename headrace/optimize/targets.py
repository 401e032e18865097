"""What to write anew: the roofline chooses the op, the block or the layer.

An op's worth is the time that a step would lose if it ran at its roof. A composite is worth at least what its
parts are, so the choice starts at the top and goes down to a part while that part alone holds most of the
worth: fusing what is around it would then bring little. Prefill of long prompts ends at the products, decode
of one sequence at the whole layer. A composite above the chosen part counts only for what it has beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.words import count
from headrace.kernels.linear import FEW_ROWS
from headrace.kernels.native.signature import SIGNATURES
from headrace.models.config import DecoderConfig
from headrace.optimize.dims import op_dims
from headrace.optimize.records import CallShape, KernelProfile, OpProfile, Phase, PhaseProfile, Target

MIN_GAIN = 1.02
"""Below this end-to-end gain at the roof a target is not worth a round."""

HOLDS_MOST = 0.8
COUNTS_AFTER_WIN = 0.5
"""How much of a target's worth counts after each round that it won: the easy part of it is gone."""

MIN_ROWS = 8
"""A kernel for decodes covers at least this many rows."""

_EVERY_STEP: tuple[tuple[Phase, int, int], ...] = (
    ("decode", 1, 250),
    ("decode", 8, 250),
    ("prefill", 256, 0),
)

Key: TypeAlias = "tuple[str, str, tuple[tuple[str, int], ...], str]"


@dataclass(frozen=True)
class Tried:
    """A target of an earlier round and whether it brought a pack."""

    target: Target
    won: bool


@dataclass(frozen=True)
class _Worth:
    """``share``: of the whole workload's time, what a phase's step would save at the roof."""

    phase: PhaseProfile
    entry: OpProfile
    share: float


def find_targets(
    profile: KernelProfile,
    config: DecoderConfig,
    tried: Sequence[Tried] = (),
    *,
    block_size: int,
    quantization: str = "auto",
) -> list[Target]:
    """Targets worth a round, the best first; what was tried in vain is left out. ``quantization``: the
    setting that the profile was taken with."""
    lost = {_key(one.target) for one in tried if not one.won}
    won = [_key(one.target) for one in tried if one.won]
    whole = sum(phase.num_steps * phase.step_s for phase in profile.phases)
    found: dict[Key, tuple[float, Target]] = {}
    for phase in profile.phases:
        for worth in _worths(phase, phase.num_steps * phase.step_s / whole if whole else 0.0):
            target = _target(profile, worth, config, block_size, quantization)
            key = _key(target)
            share = worth.share * COUNTS_AFTER_WIN ** won.count(key)
            if key not in lost and _gain(share) >= MIN_GAIN and (key not in found or found[key][0] < share):
                found[key] = share, target
    return [target for _, target in sorted(found.values(), key=lambda pair: -pair[0])]


def part_of(path: str) -> str:
    """Which use of its op a path's last word names: ``…/linear.down`` → ``down``; empty without one."""
    part = path.rpartition("/")[2].partition(".")[2]
    return {"o": "out"}.get(part, part)


def _worths(phase: PhaseProfile, phase_share: float) -> list[_Worth]:
    """Every op of a phase that a kernel can implement."""
    entries = {entry.path: entry for entry in phase.ops if entry.op in SIGNATURES}
    recoverable = {path: entry.recoverable_s for path, entry in entries.items()}
    for top in [path for path in entries if not any(_inside(path, other) for other in entries)]:
        chosen = _descend(top, entries)
        for path in entries:
            if _inside(chosen, path):
                recoverable[path] -= entries[chosen].recoverable_s
    worths = []
    for path, entry in entries.items():
        alike = [other for other in entries.values() if _same_kernel(entry, other)]
        if entry.path == max(alike, key=lambda one: one.recoverable_s).path:  # one target for all its uses
            saved = sum(recoverable[other.path] for other in alike)
            worths.append(_Worth(phase, entries[path], phase_share * saved / phase.step_s))
    return worths


def _descend(path: str, entries: dict[str, OpProfile]) -> str:
    while True:
        enough = HOLDS_MOST * entries[path].recoverable_s
        parts = [
            other for other in entries if _inside(other, path) and entries[other].recoverable_s >= enough > 0
        ]
        if not parts:
            return path
        path = min(parts, key=lambda other: other.count("/"))


def _same_kernel(one: OpProfile, other: OpProfile) -> bool:
    return one.op == other.op and (one.op != "linear" or part_of(one.path) == part_of(other.path))


def _inside(path: str, other: str) -> bool:
    return path.startswith(other + "/")


def _target(
    profile: KernelProfile, worth: _Worth, config: DecoderConfig, block_size: int, quantization: str
) -> Target:
    entry, phase = worth.entry, worth.phase.phase
    fixed = op_dims(entry.op, config, phase=phase, block_size=block_size, part=part_of(entry.path))
    shapes = sorted(entry.shapes, key=lambda shape: -shape.calls_per_step)
    rows = max(shape.rows for shape in shapes)
    return Target(
        op=entry.op,
        model=profile.model,
        phase=phase,
        weight_dtype=profile.dtype,
        activation_dtypes=list(dict.fromkeys(shape.dtype for shape in shapes)),
        max_rows=max(rows, MIN_ROWS) if phase == "decode" else rows,
        shapes=shapes,
        dims=fixed.dims,
        floats=fixed.floats,
        present=fixed.present,
        layers=fixed.layers,
        baseline_s=entry.total_s / entry.calls_per_step if entry.calls_per_step else 0.0,
        end_to_end_gain=_gain(worth.share),
        why=_why(entry, worth, shapes[0]),
        norm_dtype=norm_dtype(config),
        quantization=quantization,
    )


def norm_dtype(config: DecoderConfig) -> str:
    """That of a model's norm weights; empty: as its others."""
    return "float32" if config.norm_plus_one else ""


def whole_target(
    op: str,
    model: str,
    config: DecoderConfig,
    *,
    dtype: str = "bfloat16",
    formats: Sequence[str] = (),
    quantization: str = "auto",
    block_size: int = 32,
) -> Target:
    """An op in every step of a model, for a kernel that covers them all: decodes of one and of eight, which
    decide, and a prompt. ``formats``: of the weights where they are blocks."""
    shapes, fixed = [], op_dims(op, config, phase="prefill", block_size=block_size, part="down")
    for phase, rows, context in _EVERY_STEP:
        if op == "logits_head" and phase == "prefill":
            continue  # of a prompt's rows the last alone gets there
        shapes.append(
            CallShape(
                phase=phase,
                rows=rows,
                context=context,
                calls_per_step=float(fixed.layers),
                dtype="float32" if rows <= FEW_ROWS else dtype,
                dims=fixed.dims,
            )
        )
    return Target(
        op=op,
        model=model,
        phase="decode",
        weight_dtype=dtype,
        activation_dtypes=["float32", dtype],
        max_rows=max(shape.rows for shape in shapes),
        shapes=shapes,
        dims=fixed.dims,
        floats=fixed.floats,
        present=fixed.present,
        layers=fixed.layers,
        baseline_s=0.0,
        end_to_end_gain=1.0,
        why=f"{op} in every step",
        weight_formats=list(formats),
        norm_dtype=norm_dtype(config),
        quantization=quantization,
    )


def _why(entry: OpProfile, worth: _Worth, shape: CallShape) -> str:
    share = entry.total_s / worth.phase.step_s
    return (
        f"{entry.path} takes {100 * share:.0f} % of a {worth.phase.phase} step of "
        f"{1e3 * worth.phase.step_s:.2f} ms and runs at {100 * entry.roof_share:.0f} % of its roof "
        f"({entry.bound}-bound, {count(shape.rows, 'row')}): at the roof a step saves "
        f"{1e3 * entry.recoverable_s:.2f} ms, the workload runs {_gain(worth.share):.2f}x"
    )


def _gain(share: float) -> float:
    return 1.0 / max(1e-3, 1.0 - share)


def _key(target: Target) -> Key:
    return target.op, target.phase, tuple(sorted(target.dims.items())), target.module
