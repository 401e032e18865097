from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["unix", "tcp"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/kv.sock" if request.param == "unix" else "tcp://127.0.0.1:0"
