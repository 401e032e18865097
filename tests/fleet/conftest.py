from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: the path of a Unix socket has room for 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)
