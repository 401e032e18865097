"""What a writer of kernels is told, be it a model behind an endpoint or an agent with a task file."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.machine import num_cores
from headrace.core.packs import KernelEntry
from headrace.kernels.native.build import INCLUDE, STANDARD_FLAGS, cpu_features
from headrace.kernels.native.signature import ACTIVATIONS, SIGNATURES, Signature
from headrace.optimize.journal import ratios_text
from headrace.optimize.proposal import Trial
from headrace.optimize.records import Target

SOURCE = "kernel.cpp"
NUM_FAILURES = 3
_FAILURE_CHARS = 800
_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni", "amx_bf16")
_PARTS = {
    "gated_linear": ("linear", "activation_and_mul"),
    "mlp_block": ("gated_linear", "linear", "activation_and_mul"),
    "attention_block": ("linear", "rope", "attention"),
    "decoder_layer": (
        "rms_norm",
        "attention_block",
        "mlp_block",
        "gated_linear",
        "linear",
        "rope",
        "attention",
    ),
}


@dataclass(frozen=True)
class OpText:
    """How an op is described: what a call holds, and what it means in Python."""

    signature: Signature
    reference: str


def op_text(target: Target) -> OpText:
    """An op's reference, and for a composite those of its parts; a user's module's file."""
    if target.call is not None:
        from headrace.optimize.modules.bound import signature_of

        return OpText(signature_of(target.call), target.call.source)
    from headrace.kernels import composite, reference

    names = (target.op, *_PARTS.get(target.op, ()))
    sources = [
        inspect.getsource(getattr(composite, name, None) or getattr(reference, name)) for name in names
    ]
    if any(name == "attention" for name in names):
        sources.append(inspect.getsource(reference._attend))
    return OpText(SIGNATURES[target.op], "\n\n".join(sources))


def header() -> str:
    """headrace_kernel.h."""
    return (INCLUDE / "headrace_kernel.h").read_text()


def default_entry(target: Target, source: str = SOURCE) -> KernelEntry:
    """A kernel for all that the target asks for."""
    return KernelEntry(
        op=target.op,
        source=source,
        phases=[target.phase],
        max_rows=target.max_rows,
        activation_dtypes=target.activation_dtypes,
        weight_formats=target.formats,
    )


def skeleton(target: Target, text: OpText) -> str:
    """A source that compiles and declines every call: includes, the slots as an enum, hr_run."""
    signature = text.signature
    enums = [
        f"enum {{ {', '.join(prefix + name for name in names)} }};"
        for prefix, names in (("S_", signature.names()), ("I_", signature.ints), ("F_", signature.floats))
        if names
    ]
    lines = [
        '#include "headrace_kernel.h"',
        *enums,
        "",
        'extern "C" int hr_run(const hr_call *call) {',
        "    const hr_tensor *t = call->tensors;",
    ]
    first = signature.names()[0]
    lines += [
        f"    const int64_t rows = t[S_{first}].shape[0];",
        "    // … compute; return HR_DONE when the output is written",
        "    return HR_NOT_MINE;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def facts(target: Target, text: OpText) -> str:
    """The target in Markdown: what, why, shapes, slots, machine."""
    absent = {slot.name for slot in text.signature.slots if slot.optional} - set(target.present)
    sizes = (
        {}
        if target.call is None
        else {slot.name: f", {slot.dtype} {tuple(slot.shape)}" for slot in target.call.slots}
    )
    slots = [
        f"- `{slot.name}` ({slot.role}{sizes.get(slot.name, '')}"
        f"{', absent here' if slot.name in absent else ''})"
        for slot in text.signature.slots
    ]
    shapes = [
        f"- {shape.phase}: {shape.rows} rows, {shape.dtype}, "
        + (f"{shape.context} cached tokens, " if shape.context else "")
        + f"{shape.calls_per_step:g} calls a step"
        for shape in target.shapes
    ]
    dims = ", ".join(f"{name} {_named(name, value)}" for name, value in target.dims.items())
    floats = ", ".join(f"{name} {value:g}" for name, value in target.floats.items())
    return "\n".join(
        (
            f"Op `{target.op}` of {target.model or target.module}. {target.why}.",
            "",
            f"One call takes {1e6 * target.baseline_s:.0f} µs now. "
            f"Weights are {' and '.join(target.formats)}, "
            f"activations {' or '.join(target.activation_dtypes)}; a kernel must cover every call of "
            f"up to {target.max_rows} rows in {target.phase}.",
            "",
            f"Machine: {machine()}.",
            "",
            "Shapes that occur:",
            *shapes,
            "",
            *([f"Dimensions: {dims}." + (f" Numbers: {floats}." if floats else ""), ""] if dims else []),
            "Slots of a call, in order:",
            *slots,
        )
    )


def results(best: Trial | None, history: Sequence[Trial]) -> str:
    """The best source so far and why the last ones failed, in Markdown; empty at the start."""
    parts = []
    if best is not None:
        speed = ratios_text(best.measurement.alone) if best.measurement is not None else "not timed"
        parts.append(f"## The best so far: {speed}\n\n```cpp\n{source_of(best).rstrip()}\n```")
    failed = [trial for trial in history if not trial.verdict.passed][-NUM_FAILURES:]
    if failed:
        lines = [
            f"- candidate {trial.candidate.name}: {trial.verdict.reason}: "
            f"{trial.verdict.detail[:_FAILURE_CHARS]}"
            for trial in failed
        ]
        parts.append("## The last failures\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def source_of(trial: Trial) -> str:
    """The main source of a candidate, empty if it has none any more."""
    path: Path = trial.folder / SOURCE
    if not path.exists():
        path = next(iter(sorted(trial.folder.rglob("*.cpp"))), path)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def machine() -> str:
    """The CPU's words that matter to a kernel, cores, and how it is compiled."""
    there = cpu_features()
    features = " ".join(word for word in _FEATURES if word in there) or "no vector extensions known"
    return f"{num_cores()} cores, {features}; compiled with {' '.join(STANDARD_FLAGS[:4])}"


def _named(name: str, value: int) -> str:
    return f"{value} ({ACTIVATIONS[value]})" if name == "activation" else str(value)
