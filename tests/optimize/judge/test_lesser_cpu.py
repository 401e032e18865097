"""Kernels for a CPU without AVX-512 are held against torch as it is on such a one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.errors import UsageError
from headrace.core.packs import KernelEntry
from headrace.kernels.native.build import cpu_features
from headrace.optimize.judge import alone, lesser_cpu, measure
from headrace.optimize.judge.baseline import Baseline
from headrace.optimize.judge.options import JudgeOptions
from tests.optimize.judge.candidates import HERE, candidate, target

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512_bf16")
OPTIONS = JudgeOptions(threads=1, compile_s=300.0, call_s=30.0, alone_s=0.3, roof=1e15)
LOOK = """
import torch
from headrace.kernels.table import OpTable
print(torch.backends.cpu.get_cpu_capability())
ops = OpTable.stock("cpu", torch.bfloat16)
weight = torch.randn(48, 64).bfloat16()
packed = ops.pack_linear(weight)
print(packed.form)
for rows in (1, 5, 40):
    x = torch.randn(rows, 64).bfloat16()
    off = (ops.linear(x, packed).double() - x.double() @ weight.double().T).abs().max()
    assert off < 0.2, off
"""


@pytest.fixture
def with_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesser_cpu, "cpu_features", lambda: frozenset(AVX512))


@pytest.mark.usefixtures("with_avx512")
def test_limited_only_for_a_lesser_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lesser_cpu.limits(AVX2)["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "FBGEMM_ENABLE_INSTRUCTIONS=AVX2" in lesser_cpu.described(AVX2)
    for features in (AVX512, (), ("asimd", "bf16")):
        assert not lesser_cpu.limits(features) and not lesser_cpu.described(features)
    monkeypatch.setattr(lesser_cpu, "cpu_features", lambda: frozenset(AVX2))
    assert not lesser_cpu.limits(AVX2), "this CPU is such a one"


@pytest.mark.usefixtures("with_avx512")
def test_kernels_must_be_built_without_it() -> None:
    plain = KernelEntry(op="rms_norm", source="k.cpp")
    lesser_cpu.check_flags_for(AVX512, [plain])
    lesser_cpu.check_flags_for(AVX2, [KernelEntry(op="rms_norm", source="k.cpp", flags=["-mno-avx512f"])])
    with pytest.raises(UsageError, match="rms_norm is for CPUs without avx512f") as caught:
        lesser_cpu.check_flags_for(AVX2, [plain])
    assert "-mno-avx512f" in (caught.value.hint or "")


@pytest.mark.usefixtures("with_avx512")
@pytest.mark.skipif("avx2" not in cpu_features(), reason="this CPU has no AVX2")
def test_stock_operators_under_the_limits() -> None:
    """Torch keeps to AVX2, and bfloat16 weights are in a form that computes there."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), **lesser_cpu.limits(AVX2)}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    capability, form = done.stdout.split()
    assert capability == "AVX2" and form == "half"


@pytest.mark.usefixtures("with_avx512")
@pytest.mark.skipif("avx2" not in cpu_features(), reason="this CPU has no AVX2")
@pytest.mark.parametrize(("features", "limited"), [(AVX2, True), (AVX512, False), ((), False)])
def test_the_baseline_alone(
    features: tuple[str, ...], limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the environment of the process that makes the baseline's calls."""
    seen: list[bytes] = []
    ready = Baseline.wait_ready

    def look(self: Baseline) -> None:
        ready(self)
        seen.append(Path(f"/proc/{self._child.pid}/environ").read_bytes())

    monkeypatch.setattr(alone.Baseline, "wait_ready", look)
    folder = candidate(tmp_path / "plain", HERE / "honest" / "plain.cpp")
    found = measure.alone(folder, target(), options=OPTIONS.for_cpu(features))
    assert found.alone["decode/1"].pairs
    assert [b"ATEN_CPU_CAPABILITY=avx2" in each for each in seen] == [limited]
