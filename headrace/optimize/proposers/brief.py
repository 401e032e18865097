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


_CACHE = {
    "keys": "(num_kv_heads, slots, head_dim), a dtype of its own",
    "values": "(num_kv_heads, slots, v_head_dim), likewise",
    "slot_mapping": "(rows) int64: where each row's key and value go, before anything is attended to",
    "block_tables": "(decodes, blocks) int64: token p of a sequence is in slot "
    "table[p / block_size] * block_size + p % block_size",
    "lens": "(decodes) int64: the keys that each decode sees, its own included",
    "chunks": "(prefills, 3) int64: first row, row after the last, tokens cached before them",
    "chunk_tables": "(prefills, blocks) int64",
}
_WIDEN = """\
static inline float widen(uint16_t half) {  // bfloat16 is the upper half of a float
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
"""
_C_TYPES = {"float32": ("float", "HR_F32"), "bfloat16": ("uint16_t", "HR_BF16")}


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
    """A source that compiles and declines every call: includes, the slots as an enum, hr_run with the numbers
    of a call, and its tensors where the target says their dtype."""
    signature = text.signature
    enums = [
        f"enum {{ {', '.join(prefix + name for name in names)} }};"
        for prefix, names in (("S_", signature.names()), ("I_", signature.ints), ("F_", signature.floats))
        if names
    ]
    known = _dtypes(target, signature) if target.call is None else {}
    lines = ["#include <cmath>", "#include <cstring>", '#include "headrace_kernel.h"', *enums, ""]
    if "bfloat16" in known.values():
        lines.append(_WIDEN)
    lines += [
        'extern "C" int hr_run(const hr_call *call) {',
        "    const hr_tensor *t = call->tensors;",
    ]
    if known:
        wrong = [f"t[S_{name}].dtype != {_C_TYPES[dtype][1]}" for name, dtype in known.items()]
        lines += [f"    if ({' || '.join(wrong)}) return HR_NOT_MINE;"]
    for name, dtype in known.items():
        const = "const " if signature.slot(name).role in ("input", "weight") else ""
        kind = f"{const}{_C_TYPES[dtype][0]} *"
        lines.append(f"    {kind}{name} = ({kind})t[S_{name}].data;")
    for kind, prefix, names in (("int64_t", "I_", signature.ints), ("double", "F_", signature.floats)):
        field = "ints" if prefix == "I_" else "floats"
        lines += [f"    const {kind} {name} = call->{field}[{prefix}{name}];" for name in names]
    first = signature.names()[0]
    lines += [
        f"    const int64_t rows = t[S_{first}].shape[0], last = t[S_{first}].ndim - 1;",
        f"    const int64_t width = t[S_{first}].shape[last];  // of {first}",
        "    // … compute; return HR_DONE when the output is written",
        "    return HR_NOT_MINE;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def facts(target: Target, text: OpText) -> str:
    """The target in Markdown: what, why, shapes, slots, machine."""
    absent = {slot.name for slot in text.signature.slots if slot.optional} - set(target.present)
    sizes = _sizes(target, text.signature)
    slots = [
        f"- `{slot.name}` ({slot.role}): "
        + ("absent here" if slot.name in absent else sizes.get(slot.name, "as the reference says"))
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
            "Slots of a call, in order, each dense in its last dimension:",
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
        if best is None:
            last = failed[-1]
            parts.append(
                f"## Candidate {last.candidate.name}, which failed so\n\nNot again this one: mend it or "
                f"write another.\n\n```cpp\n{source_of(last).rstrip()}\n```"
            )
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


def _dtypes(target: Target, signature: Signature) -> dict[str, str]:
    """The dtype of each slot that is there and of which it is known; the cache has one of its own."""
    found = {}
    for slot in signature.slots:
        if slot.name in _CACHE or (slot.optional and slot.name not in target.present):
            continue
        if slot.role == "weight":
            found[slot.name] = target.weight_dtype
        elif (target.op, slot.name) == ("logits_head", "out"):
            found[slot.name] = "float32"
        elif len(target.activation_dtypes) == 1:
            found[slot.name] = target.activation_dtypes[0]
    return found


def _sizes(target: Target, signature: Signature) -> dict[str, str]:
    """Shape and dtype of each slot of a call, in words."""
    if target.call is not None:
        return {slot.name: f"{_shape(slot.shape)} {slot.dtype}" for slot in target.call.slots}
    import torch

    from headrace.optimize.judge.slots import call_specs, weight_specs

    kind, present, any_rows = torch.float32, frozenset(target.present), -1
    specs = [
        *weight_specs(target.op, target.dims, present, kind),
        *call_specs(target.op, target.dims, present, any_rows, kind, kind, None, 0),
    ]
    dtypes, either = _dtypes(target, signature), " or ".join(target.activation_dtypes)
    sizes = {spec.slot: f"{_shape(spec.shape)} {dtypes.get(spec.slot, either)}" for spec in specs}
    for name in ("gate_up", "weight"):
        if name in sizes and (name == "gate_up" or target.op == "gated_linear"):
            sizes[name] += ", gate rows, then up rows"
    return sizes | {slot.name: _CACHE[slot.name] for slot in signature.slots if slot.name in _CACHE}


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join('rows' if size < 0 else str(size) for size in shape)})"


def _named(name: str, value: int) -> str:
    return f"{value} ({ACTIVATIONS[value]})" if name == "activation" else str(value)
