"""Building: one library for one text, and errors that say what is wrong."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.core import leftovers
from headrace.core.errors import CompileError, CompilerMissingError, PackError
from headrace.kernels.native import build_cache
from headrace.kernels.native.build import check_flags, compile_kernel, cpu_features, find_compiler
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
    assert {path.suffix for path in (tmp_path / "built").iterdir()} == {".so", ".sha256"}


@pytest.mark.usefixtures("compiler")
def test_a_compile_error_shows_the_first_lines(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_kernel(SOURCES / "broken.cpp", [], tmp_path)
    assert caught.value.code == "compile_error"
    assert "broken.cpp:2:" in caught.value.message and "error" in caught.value.message
    assert len(caught.value.message.splitlines()) < 20
    assert caught.value.message.splitlines()[1].startswith("broken.cpp:2:"), "without the copy's folder"
    assert not list(tmp_path.iterdir())


def mock(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is this script, which knows its version and where the library goes."""
    path = tmp_path / "mock"
    find = 'for word in "$@"; do [ "$last" = -o ] && target=$word; last=$word; done'
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo mock 1.0; exit 0; }}\n{find}\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("damage", ["truncated", "a bit", "emptied", "no digest", "garbled digest"])
def test_a_library_that_was_damaged_is_built_again(tmp_path: Path, damage: str) -> None:
    """In a copy that is not loaded: this process would have to die for it to be seen otherwise."""
    text, folder = source(tmp_path), tmp_path / "built"
    library = compile_kernel(text, ["-DRESULT=4"], folder)
    digest = folder / f"{library.name}.sha256"
    whole = library.read_bytes()
    if damage == "no digest":
        digest.unlink()
    elif damage == "garbled digest":
        digest.write_bytes(b"\xff")
    elif damage == "a bit":
        library.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        os.truncate(library, 5000 if damage == "truncated" else 0)
    before = library.stat().st_ino
    assert compile_kernel(text, ["-DRESULT=4"], folder) == library
    assert library.stat().st_ino != before and NativeKernel(library).run(0) == 4
    now = library.stat().st_ino
    assert compile_kernel(text, ["-DRESULT=4"], folder).stat().st_ino == now, "and kept"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "script",
    [
        '{cxx} "$@" && truncate -s 5000 "$target"',
        'echo "__attribute__((constructor)) void f() {{ *(volatile int *)0 = 1; }}" > "$target.c";'
        ' exec {cxx} -shared -fPIC -x c "$target.c" -o "$target"',
    ],
    ids=["truncated", "constructor"],
)
def test_a_library_that_crashes_when_loaded_is_found_out_elsewhere(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock(tmp_path, script.format(cxx=find_compiler()[0]), monkeypatch)
    with pytest.raises(CompileError, match=r"crashes when it is loaded \(killed by SIG(BUS|SEGV)\)"):
        compile_kernel(source(tmp_path), ["-DRESULT=4"], tmp_path / "built")
    assert not list((tmp_path / "built").iterdir())


@pytest.mark.usefixtures("compiler")
def test_a_library_that_cannot_be_loaded_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is mended, and says the same of itself, builds it."""
    bad = tmp_path / "bad"
    bad.touch()
    script = f'[ -e {bad} ] && {{ : > "$target"; exit 0; }}; exec {find_compiler()[0]} "$@"'
    mock(tmp_path, script, monkeypatch)
    with pytest.raises(CompileError, match=r"cannot be loaded: .*file too short"):
        compile_kernel(source(tmp_path), ["-DRESULT=4"], tmp_path / "built")
    bad.unlink()
    assert NativeKernel(compile_kernel(source(tmp_path), ["-DRESULT=4"], tmp_path / "built")).run(0) == 4


@pytest.mark.usefixtures("compiler")
def test_a_build_that_hangs_elsewhere_leaves_time_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times: list[float] = []

    def build(*_: object, timeout_s: float) -> list[Path]:
        times.append(timeout_s)
        return []

    monkeypatch.setattr(build_cache, "read_files", lambda pack, manifest: {})
    monkeypatch.setattr(build_cache, "build_files", build)
    folder = tmp_path / "kernels"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    manifest: Any = None
    try:
        with build_cache.built(tmp_path, manifest, folder, timeout_s=6.0):
            pass
    finally:
        os.close(descriptor)
    assert times[0] > 2.0
    assert "waiting for another process" in caplog.text


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", r"does not compile:\n.*mock said nothing \(exit code 3\)"),
        ("kill -SEGV $$", r"does not compile:\n.*mock said nothing \(killed by SIGSEGV\)"),
        ("exit 0", "mock reported success and wrote no library"),
    ],
)
def test_a_compiler_without_words(
    tmp_path: Path, script: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock(tmp_path, script, monkeypatch)
    with pytest.raises(CompileError, match=words):
        compile_kernel(source(tmp_path), [], tmp_path / "built")


@pytest.mark.parametrize(
    "words", ["No space left on device", "Disk quota exceeded", "File size limit exceeded"]
)
def test_no_room_is_the_folders_fault(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mock(tmp_path, f"echo 'ld: {words}'; exit 1", monkeypatch)
    with pytest.raises(OSError, match=r"\[Errno"):
        compile_kernel(source(tmp_path), [], tmp_path / "built")


def test_a_folder_that_is_removed_during_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock(tmp_path, f"rm -r {tmp_path}/built; echo 'error: cannot open output file'; exit 1", monkeypatch)
    with pytest.raises(OSError, match="removed during the build"):
        compile_kernel(source(tmp_path), [], tmp_path / "built")


def test_what_ended_builds_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / "built" / f".build-{leftovers.namespace()}-{ended.pid}-abc"
    other = tmp_path / "built" / f".build-{leftovers.namespace()}-{os.getppid()}-abc"
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "part.so").write_text("")
    mock(tmp_path, "exit 1", monkeypatch)
    with pytest.raises(CompileError):
        compile_kernel(source(tmp_path), [], tmp_path / "built")
    assert list((tmp_path / "built").iterdir()) == [other]


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
    monkeypatch.setenv("CXX", "g++ '-O2")
    with pytest.raises(CompilerMissingError, match=r"CXX=g\+\+ '-O2 cannot be split into words"):
        compile_kernel(source(tmp_path), [], tmp_path / "built")
    text = tmp_path / "text"
    text.write_bytes(b"\x7fELF, and no more")
    text.chmod(0o755)
    monkeypatch.setenv("CXX", str(text))
    with pytest.raises(CompileError, match="text cannot be run: Exec format error"):
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
