"""judge: build a candidate in a sandbox, prove it right or wrong, and time it against what runs today."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.core.errors import UnavailableError, UsageError
from headrace.core.packs import KernelEntry
from headrace.core.words import count

if TYPE_CHECKING:
    from headrace.optimize.records import Measurement, Target, Verdict

VERDICT_FILE = "verdict.json"
MEASUREMENT_FILE = "measurement.json"
_WRITES_TARGETS = "`headrace optimize kernels` writes one for every round"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", help="a candidate: kernel.json, its sources, and the target as target.json"
    )
    parser.add_argument("--target", metavar="FILE", help="the target [default: DIR/target.json]")
    parser.add_argument(
        "--baseline", metavar="PACK", help="folder of the pack to beat [default: none, stock]"
    )
    parser.add_argument("--verify-only", action="store_true", help="right or wrong, and no timing")
    parser.add_argument("--alone", action="store_true", help="time it by itself only, not on the workload")
    parser.add_argument("--quick", action="store_true", help="fewer calls and shorter timing")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads [default: every core]")


def main(arguments: argparse.Namespace) -> int:
    from headrace.optimize.judge.judge import judge
    from headrace.optimize.judge.options import JudgeOptions
    from headrace.optimize.judge.verify import verify

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", hint="headrace judge DIR", param="DIR")
    if arguments.threads < 0:
        raise UsageError(f"--threads must be at least 1, got {arguments.threads}", param="--threads")
    target = _target(Path(arguments.target) if arguments.target else folder / "target.json")
    options = JudgeOptions.quick() if arguments.quick else JudgeOptions()
    if arguments.threads:
        options = options.with_threads(arguments.threads)
    measurement: Measurement | None = None
    if arguments.verify_only:
        verdict = verify(folder, target, options=options)
    else:
        pack = Path(arguments.baseline) if arguments.baseline else None
        verdict, measurement = judge(
            folder, target, baseline_pack=pack, end_to_end=not arguments.alone, options=options
        )
    _show(verdict, measurement)
    try:
        _write(folder, verdict, measurement)
    except OSError as error:
        raise UnavailableError(
            f"the verdict cannot be written to {folder}: {error}", hint="judge a copy in a folder of your own"
        ) from None
    return 0 if verdict.passed else 1


def _target(path: Path) -> Target:
    from headrace.optimize.records import Target

    try:
        target = msgspec.json.decode(path.read_bytes(), type=Target)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint=_WRITES_TARGETS) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", hint=_WRITES_TARGETS) from None
    if reason := _not_whole(target):
        raise UsageError(f"{path}: {reason}", hint=_WRITES_TARGETS)
    return target


def _not_whole(target: Target) -> str:
    """Why no kernel can be judged on it, empty: it can."""
    from headrace.kernels.native.signature import SIGNATURES
    from headrace.optimize.judge.cases import OpProblem

    if target.module:
        return "" if target.call is not None else f"module {target.module} without its call"
    if target.op not in SIGNATURES:
        return f"no op is called {target.op!r}, there are {', '.join(sorted(SIGNATURES))}"
    known = ("bfloat16", "float32")
    kinds = [target.weight_dtype, *target.activation_dtypes, *(shape.dtype for shape in target.shapes)]
    if unknown := sorted({kind for kind in kinds if kind not in known}):
        return f"dtype {unknown[0]!r}, there are {' and '.join(known)}"
    if target.max_rows < 1 or target.layers < 1 or any(shape.rows < 1 for shape in target.shapes):
        return "max_rows, layers and every shape's rows must be at least 1"
    if not target.shapes:
        return "it names no shapes"
    try:
        probe = OpProblem(target, KernelEntry(op=target.op, source="", phases=[target.phase], max_rows=1))
        probe.weights()
        probe.verify_cases(0)
    except KeyError as error:
        return f"{target.op} needs {error.args[0]!r} in dims or floats"
    return ""


def _write(folder: Path, verdict: Verdict, measurement: Measurement | None) -> None:
    """Beside the candidate; what an earlier run measured is taken away."""
    (folder / VERDICT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(verdict)) + b"\n")
    path = folder / MEASUREMENT_FILE
    if measurement is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(measurement)) + b"\n")


def _show(verdict: Verdict, measurement: Measurement | None) -> None:
    print(f"{'right' if verdict.passed else 'rejected: ' + verdict.reason}: {verdict.detail}")
    if verdict.passed:
        for each in verdict.errors:
            shape = each.shape
            print(
                f"  {shape.phase}, {count(shape.rows, 'row')}, context {shape.context}, {shape.dtype}: error "
                f"{each.error:.2g} of {each.limit:.2g} allowed (stock {each.stock_error:.2g})"
            )
    if measurement is not None:
        for kind, ratios in (("alone", measurement.alone), ("end to end", measurement.end_to_end)):
            for name, ratio in ratios.items():
                print(
                    f"  {kind}, {name}: {ratio.median:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}] of "
                    f"{ratio.pairs} pairs; {1e6 * ratio.baseline_s:.1f} -> {1e6 * ratio.candidate_s:.1f} us"
                )
        if measurement.agreement:
            print(f"  {measurement.agreement}")
        print(f"{'won' if measurement.won else 'not won'}: {measurement.detail}")
    print(f"sandbox: {verdict.sandbox}; {verdict.seconds:.1f} s")
