"""The whole workload on two caged engines: a tiny model, a right kernel and one that is subtly wrong."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.core.knobs import EngineConfig
from headrace.core.packs import KernelEntry
from headrace.kernels.native.build import cpu_features
from headrace.models.families import read_config
from headrace.models.fields import read_json
from headrace.optimize.dims import op_dims
from headrace.optimize.judge import end_to_end, lesser_cpu
from headrace.optimize.judge.end_to_end import EndToEnd, Setting, _distance, compare_engines
from headrace.optimize.judge.engine_child import PassReport, Position
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.sandbox import Cage, Caged, Sandbox
from headrace.optimize.judge.verify import build
from headrace.optimize.profile.workloads import Workload, WorkloadRequest
from headrace.optimize.records import CallShape, Target
from headrace.optimize.targets import whole_target
from tests.kernels.native.conftest import SOURCES
from tests.models.tiny import make_tiny
from tests.optimize.judge.test_blocks import candidate as blocks_candidate

OPTIONS = JudgeOptions(threads=1, compile_s=300.0, end_to_end_s=0.2)


def workload() -> Workload:
    pick = random.Random(3)
    requests = [WorkloadRequest(prompt=[pick.randrange(90) for _ in range(20)], max_tokens=12)]
    return Workload(name="short", requests=requests, concurrency=1)


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., EndToEnd]:
    """Compares two engines, one of which has an rms_norm of this text."""
    model = make_tiny("llama", tmp_path / "model")
    fixed = op_dims("rms_norm", read_config(read_json(model / "config.json")), phase="decode", block_size=32)
    shape = CallShape(phase="decode", rows=1, context=16, calls_per_step=5, dtype="float32", dims=fixed.dims)
    target = Target(
        op="rms_norm",
        model=str(model),
        phase="decode",
        weight_dtype="bfloat16",
        activation_dtypes=["float32", "bfloat16"],
        max_rows=8,
        shapes=[shape],
        dims=fixed.dims,
        floats=fixed.floats,
        present=fixed.present,
        layers=fixed.layers,
        baseline_s=1e-5,
        end_to_end_gain=1.1,
        why="",
    )

    def run(change: str, options: JudgeOptions = OPTIONS) -> EndToEnd:
        folder = tmp_path / "candidate"
        folder.mkdir()
        shutil.copyfile(SOURCES / "plain.h", folder / "plain.h")
        text = (SOURCES / "rms_norm.cpp").read_text()
        (folder / "rms_norm.cpp").write_text(text.replace("int hr_run(", "int inner_run(") + change)
        entry = KernelEntry(op="rms_norm", source="rms_norm.cpp", max_rows=32)
        (folder / "kernel.json").write_bytes(msgspec.json.encode(entry))
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        built = build(folder, target, scratch, problem=None, options=options)
        return compare_engines(built, Setting.of(target, workload(), None, options), options)

    return run


def test_right_kernel_agrees(compare: Callable[..., EndToEnd]) -> None:
    found = compare('extern "C" int hr_run(const hr_call *call) { return inner_run(call); }\n')
    assert found.agrees, found.agreement
    assert set(found.ratios) == {"workload", "decode_tok_s", "prefill_tok_s"}
    assert found.ratios["workload"].pairs >= 5


def test_wrong_kernel_does_not_agree(compare: Callable[..., EndToEnd]) -> None:
    found = compare(
        'extern "C" int hr_run(const hr_call *call) {\n'
        "    int said = inner_run(call);\n"
        "    const hr_tensor &out = call->tensors[2];\n"
        "    if (out.dtype == HR_F32)\n"
        "        for (int64_t i = 0; i < out.shape[1]; i += 2) ((float *)out.data)[i] *= 0.5f;\n"
        "    return said;\n"
        "}\n"
    )
    assert not found.agrees, found.agreement


def test_crash_in_the_engine(compare: Callable[..., EndToEnd]) -> None:
    with pytest.raises(Rejected) as caught:
        compare('extern "C" int hr_run(const hr_call *) { __builtin_trap(); }\n')
    assert caught.value.reason == "crashed"


@pytest.mark.skipif("avx2" not in cpu_features(), reason="this CPU has no AVX2")
@pytest.mark.parametrize(("features", "limited"), [(("avx2",), True), (("avx2", "avx512f"), False)])
def test_both_engines_are_kept_to_a_lesser_cpu(
    features: tuple[str, ...],
    limited: bool,
    compare: Callable[..., EndToEnd],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel is for one, and then they serve the model as it would."""
    cages: list[Cage] = []

    class Seen(Caged):
        def __init__(self, sandbox: Sandbox, cage: Cage, *rest: Any, **options: Any) -> None:
            cages.append(cage)
            super().__init__(sandbox, cage, *rest, **options)

    monkeypatch.setattr(end_to_end, "Caged", Seen)
    monkeypatch.setattr(lesser_cpu, "cpu_features", lambda: frozenset({"avx2", "avx512f"}))
    text = 'extern "C" int hr_run(const hr_call *call) { return inner_run(call); }\n'
    found = compare(text, OPTIONS.for_cpu(features))
    assert found.agrees, found.agreement
    baseline, candidate = (dict(cage.environment) for cage in cages)
    assert baseline == candidate
    assert ("ONEDNN_MAX_CPU_ISA" in baseline) is limited


@pytest.mark.parametrize(("levels", "agrees"), [(127, True), (3, False)])
def test_several_kernels_on_blocks(levels: int, agrees: bool, tmp_path: Path) -> None:
    """Held against the same blocks and rounded activations; coarser ones are another answer."""
    model = make_tiny("llama", tmp_path / "model", hidden_size=128, intermediate_size=256)
    config = read_config(read_json(model / "config.json"))
    kernels = []
    for op in ("decoder_layer", "rms_norm", "logits_head"):
        formats = [] if op == "rms_norm" else ["q8_0"]
        target = whole_target(op, str(model), config, formats=formats, quantization="int8")
        folder = blocks_candidate(
            tmp_path / op,
            op,
            ["q8_0", "bfloat16"],
            flags=[f"-DLEVELS={levels}"],
            max_rows=0,
            activation_dtypes=["float32"],
            batch_invariant=True,
        )
        scratch = tmp_path / f"{op}-built"
        scratch.mkdir()
        kernels.append(build(folder, target, scratch, problem=None, options=OPTIONS))
        if op == "decoder_layer":
            setting = Setting.of(target, workload(), None, OPTIONS)
    assert setting.config.quantization == "int8"
    found = compare_engines(kernels, setting, OPTIONS, formats=["q8_0"])
    assert found.agrees is agrees, found.agreement


@pytest.mark.parametrize(("pack", "agrees"), [(None, False), (Path("pack"), True)])
def test_a_pack_that_computes_in_one_way_is_no_floor(
    pack: Path | None, agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate is 0.1 from its baseline, whose decode and prefill have the same bits; those of stock
    operators are 0.3 apart."""

    class Engine:
        def __init__(self, _: Any, setting: Setting, kernels: list[Any], *rest: Any, **options: Any) -> None:
            base = -1.1 if kernels else -1.0
            self.decode, self.prefill = base, base - (0.0 if kernels or setting.pack == pack else 0.3)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait_ready(self) -> None:
            pass

        def run(self) -> tuple[float, PassReport]:
            return 1.0, PassReport(
                prefill_s=0, prefill_tokens=0, decode_s=0, decode_tokens=0, tokens=[[1, 2, 3]]
            )

        def score(self, sequences: list[list[int]], together: int, chunk: int) -> list[Position]:
            return [Position([(7, self.decode if chunk else self.prefill)])] * 3

    monkeypatch.setattr(end_to_end, "_Engine", Engine)
    built: Any = SimpleNamespace(sandbox=None)
    model: Any = SimpleNamespace(folder=tmp_path)
    setting = Setting(model, workload(), EngineConfig(), pack)
    assert compare_engines([built], setting, OPTIONS).agrees is agrees


def test_lists_without_a_common_token_differ_by_a_number() -> None:
    here = Position([(1, -0.5), (2, -3.0)])
    there = Position([(3, -1.0), (4, -2.0)])
    assert _distance(here, there) == _distance(there, here) == 2.0  # token 3 is at most -3 here
    assert _distance(here, Position([(2, -2.5), (5, -2.6)])) == 0.5
