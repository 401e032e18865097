from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.core.errors import CompilerMissingError
from headrace.kernels.native.build import find_compiler


@pytest.fixture(scope="session")
def compiler() -> None:
    try:
        find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def built(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are kept, for all tests."""
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
