"""An engine in this process gets what a replica's gets, if that is not too late and not the user's own."""

from __future__ import annotations

import os
import sys

import pytest

from headrace.core.engine_environment import adopt_engine_environment


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"THP_MEM_ALLOC_ENABLE": "0"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    adopt_engine_environment()
    assert environment["THP_MEM_ALLOC_ENABLE"] == "0"
    assert environment["GOMP_SPINCOUNT"] == "5000"


def test_a_wait_policy_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OMP_WAIT_POLICY": "passive"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    adopt_engine_environment()
    assert "GOMP_SPINCOUNT" not in environment


def test_once_torch_is_loaded_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setitem(sys.modules, "torch", sys)
    adopt_engine_environment()
    assert environment == {}
