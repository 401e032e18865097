"""Tiny models, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family, **overrides)``: the folder of a random checkpoint."""
    from tests.models.tiny import make_tiny

    made: dict[tuple[str, str], Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = family, repr(sorted(overrides.items()))
        if key not in made:
            made[key] = make_tiny(family, tmp_path_factory.mktemp(family), **overrides)
        return made[key]

    return make
