"""The logic of scripts/gpu-check, on the CPU: what is equal passes, what is not does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from tests.models.tiny import make_tiny


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_equal_devices_pass_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("llama", tmp_path / "one")
    assert gpu_check.exact_row("llama", folder, "cpu").met is True
    assert gpu_check.noise_floor_row("llama", folder, "cpu").met is True

    # A device that computes something else: the engine asked for by device runs another model.
    other = make_tiny("llama", tmp_path / "other", seed=1)
    real = gpu_check.make_engine

    def astray(path: Path, **knobs: Any) -> Any:
        return real(other if "device" in knobs else path, **knobs)

    monkeypatch.setattr(gpu_check, "make_engine", astray)
    row = gpu_check.exact_row("llama", folder, "cpu")
    assert row.met is False and row.value is not None and row.value < 1
