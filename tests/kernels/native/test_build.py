"""Building: one library for one text, and errors that say what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.core.errors import CompileError, CompilerMissingError, PackError
from headrace.kernels.native.build import check_flags, compile_kernel, cpu_features
from headrace.kernels.native.op import NativeKernel
from tests.kernels.native.conftest import SOURCES

GOOD = '#include "headrace_kernel.h"\nextern "C" int hr_run(const hr_call *) { return RESULT; }\n'


def source(folder: Path, text: str = GOOD) -> Path:
    path = folder / "some.cpp"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("compiler")
def test_a_library_is_built_once_and_a_changed_text_gets_another(tmp_path: Path) -> None:
    text = source(tmp_path)
    first = compile_kernel(text, ["-DRESULT=4"], tmp_path / "built")
    again = compile_kernel(text, ["-DRESULT=4"], tmp_path / "built")
    other = compile_kernel(text, ["-DRESULT=5"], tmp_path / "built")
    assert first == again != other
    assert (NativeKernel(first).run(0), NativeKernel(other).run(0)) == (4, 5)
    (tmp_path / "some.h").write_text("// a header beside it\n")
    assert compile_kernel(text, ["-DRESULT=4"], tmp_path / "built") != first
    assert {path.suffix for path in (tmp_path / "built").iterdir()} == {".so"}


@pytest.mark.usefixtures("compiler")
def test_a_compile_error_shows_the_first_lines(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_kernel(SOURCES / "broken.cpp", [], tmp_path)
    assert caught.value.code == "compile_error"
    assert "broken.cpp:2:" in caught.value.message and "error" in caught.value.message
    assert len(caught.value.message.splitlines()) < 20
    assert not list(tmp_path.iterdir())


def test_an_endless_compiler_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    with pytest.raises(CompileError, match=r"longer than 0\.2 s"):
        compile_kernel(source(tmp_path), [], tmp_path / "built", timeout_s=0.2)


def test_a_compiler_that_does_not_say_its_version_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "silent"
    script.write_text("#!/bin/sh\nsleep 1000\n")  # its child holds the pipe when the shell is gone
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr("headrace.kernels.native.build.VERSION_S", 0.2)
    with pytest.raises(CompileError, match="--version gave no answer"):
        compile_kernel(source(tmp_path), ["-DRESULT=4"], tmp_path / "built")


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerMissingError, match=r"g\+\+ or clang\+\+") as caught:
        compile_kernel(source(tmp_path), [], tmp_path / "built")
    assert caught.value.hint
    monkeypatch.setenv("CXX", "mycxx --fast")
    with pytest.raises(CompilerMissingError, match="mycxx is not on the PATH"):
        compile_kernel(source(tmp_path), [], tmp_path / "built")


def test_flags_that_are_not_allowed() -> None:
    check_flags(
        ["-O2", "-mprefer-vector-width=512", "-funroll-loops", "-DROWS=4", "-std=c++20", "-Wno-unused"]
    )
    for flag in (
        "-o",
        "/etc/passwd",
        "-include",
        "-I/etc",
        "-fplugin=x.so",
        "-Wl,-rpath,x",
        "@file",
        "-DA=`id`",
    ):
        with pytest.raises(CompileError, match="not allowed"):
            check_flags([flag])
    for flag in ("-ffast-math", "-Ofast"):
        with pytest.raises(CompileError, match="whole process"):
            check_flags([flag])


@pytest.mark.usefixtures("compiler")
def test_libraries_that_are_no_kernels(tmp_path: Path) -> None:
    half = '#include "headrace_kernel.h"\nextern "C" int hr_run(const hr_call *) { return 0; }\n'
    half += 'extern "C" int hr_pack(const hr_call *, void *) { return 0; }\n'
    with pytest.raises(PackError, match="no function hr_packed_bytes"):
        NativeKernel(compile_kernel(source(tmp_path, half), [], tmp_path))
    with pytest.raises(PackError, match="no function hr_run"):
        NativeKernel(compile_kernel(source(tmp_path, "int hr_run(int) { return 0; }"), [], tmp_path))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(PackError, match=r"text\.so cannot be loaded"):
        NativeKernel(tmp_path / "text.so")


def test_cpu_features_are_words() -> None:
    assert all(word and " " not in word for word in cpu_features())
