"""One kernel for steps of any number of rows: which calls it is judged on, as how exact, and against what."""

from __future__ import annotations

import msgspec
import torch

from headrace.core.packs import KernelEntry
from headrace.optimize.judge.cases import OpProblem
from headrace.optimize.judge.compare import error
from headrace.optimize.judge.measure import slower_phase
from headrace.optimize.judge.problem import Case, Tensors, TensorSpec
from headrace.optimize.records import Ratio, Target
from headrace.optimize.targets import whole_target
from tests.optimize.fakes import ratio
from tests.optimize.judge import test_ops as ops

ENTRY = KernelEntry(
    op="decoder_layer",
    source="k.cpp",
    phases=["decode", "prefill"],
    max_rows=0,
    activation_dtypes=["float32"],
    batch_invariant=True,
)


def empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)


def made(problem: OpProblem, case: Case) -> tuple[Tensors, Tensors]:
    weights = {spec.slot: empty(spec) for spec in problem.weights()}
    problem.fill_weights(weights, 1)
    tensors = {spec.slot: empty(spec) for spec in case.tensors}
    problem.fill(case, tensors, "normal", 2)
    return weights, tensors


def problem(entry: KernelEntry = ENTRY, **changes: object) -> OpProblem:
    target: Target = whole_target("decoder_layer", "none", ops.GEMMA, block_size=16)
    return OpProblem(msgspec.structs.replace(target, **changes), entry)


def test_steps_of_all_kinds() -> None:
    cases = [case for seed in range(8) for case in problem().verify_cases(seed)]
    assert {case.shape.dtype for case in cases} == {"float32"}
    assert {case.shape.phase for case in cases} == {"decode", "prefill"}
    assert max(case.shape.rows for case in cases) >= 200 and min(case.shape.rows for case in cases) == 1
    mixed = [case for case in cases if case.plan.num_decodes and case.plan.prefills]
    assert mixed and all(case.shape.phase == "prefill" for case in mixed)
    assert {case.precision for case in cases} == {torch.bfloat16}


def test_timed_as_the_engine_calls_it() -> None:
    cases = problem().timed_cases(1)
    assert [(case.shape.phase, case.shape.rows) for case in cases] == [
        ("decode", 1),
        ("decode", 8),
        ("prefill", 256),
    ]
    assert all(case.shape.dtype == "float32" for case in cases)


def test_others_are_held_to_their_own_dtype() -> None:
    entry = msgspec.structs.replace(ENTRY, batch_invariant=False, max_rows=12)
    cases = problem(entry).verify_cases(1)
    assert max(case.shape.rows for case in cases) == 12  # a pack may make such steps float32
    assert {case.precision for case in cases} == {None}


def test_norms_as_the_model_has_them() -> None:
    dtypes = {spec.slot: spec.dtype for spec in problem().weights()}
    norms = {slot for slot in dtypes if slot.endswith("_norm")}
    assert norms == {
        *("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"),
        *("q_norm", "k_norm"),
    }
    assert {dtypes[slot] for slot in norms} == {torch.float32}
    assert {dtypes[slot] for slot in set(dtypes) - norms} == {torch.bfloat16}
    llama = whole_target("rms_norm", "none", ops.LLAMA)
    assert OpProblem(llama, ENTRY).weights()[0].dtype is torch.bfloat16


def test_as_exact_as_stock_is_at_many_rows() -> None:
    """Its error is that of bfloat16 at any number of rows, what it gives is float32."""
    one = problem()
    for case in one.timed_cases(1)[:2]:
        weights, tensors = made(one, case)
        truth, stock = one.reference(case, weights, tensors), one.stock(case, weights, tensors)
        assert stock["out"].dtype is torch.float32
        assert 1e-3 < error(stock["out"], truth["out"]) < 0.2


def test_the_baseline_runs_as_stock_would() -> None:
    one = problem()
    found = []
    for case in one.timed_cases(1):
        weights, tensors = made(one, case)
        with torch.inference_mode():
            found.append(one.prepare(case, weights, tensors, "")()["out"].dtype)
    assert found == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_slower_in_the_other_phase() -> None:
    def alone(**medians: float) -> dict[str, Ratio]:
        return {name.replace("_", "/"): ratio(median) for name, median in medians.items()}

    assert slower_phase(alone(decode_1=1.5, decode_8=0.5, prefill_256=1.0)) == ""
    assert slower_phase(alone(decode_1=1.5, prefill_256=0.9)) == "prefill/256"
