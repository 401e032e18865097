from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core.errors import CompilerMissingError
from headrace.kernels.native.build import compile_kernel, find_compiler
from headrace.kernels.native.op import NativeKernel

SOURCES = Path(__file__).parent / "sources"

GetKernel = Callable[[str], NativeKernel]


@pytest.fixture(scope="session")
def compiler() -> None:
    try:
        find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kernel(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> GetKernel:
    """Kernels of ``sources`` by name, built once."""
    folder = tmp_path_factory.mktemp("kernels")
    return lambda name: NativeKernel(compile_kernel(SOURCES / f"{name}.cpp", [], folder))


@pytest.fixture
def build_text(compiler: None, tmp_path: Path) -> Callable[[str], NativeKernel]:
    """A kernel from a source given as text."""

    def build(text: str) -> NativeKernel:
        source = tmp_path / "text.cpp"
        source.write_text(text)
        return NativeKernel(compile_kernel(source, [], tmp_path / "built"))

    return build
