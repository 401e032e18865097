"""The cage holds what it says, and the judge says what the candidate's folder is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from headrace.core.errors import UnavailableError
from headrace.optimize.judge import sandbox as module
from headrace.optimize.judge.build import take
from headrace.optimize.judge.layout import Memory
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.runner import build_runner
from headrace.optimize.judge.sandbox import Cage, Caged, Limits, Sandbox
from headrace.optimize.judge.verify import verify
from tests.optimize.judge.candidates import HERE, candidate, target


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return Sandbox.find(build_runner())


def shell(sandbox: Sandbox, command: str, limits: Limits = Limits()) -> str:  # noqa: B008
    with Caged(sandbox, Cage(limits), ["/bin/sh", "-c", command]) as child:
        return child.communicate(timeout=60)[0].decode()


def test_probe_holds(sandbox: Sandbox) -> None:
    assert sandbox.enough
    assert all(sandbox.held.values()), sandbox.describe()
    assert "no network" in sandbox.describe() and "NOT" not in sandbox.describe()


def test_sees_nothing_of_ours(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.environ["HEADRACE_TEST_SECRET"] = "secret"
    try:
        said = shell(sandbox, f"cat {secret}; cat /etc/passwd; ls /root /home; env; ls /tmp")
    finally:
        del os.environ["HEADRACE_TEST_SECRET"]
    assert "secret\n" not in said and "root:" not in said and "HEADRACE" not in said


def test_nothing_outlives_it(sandbox: Sandbox) -> None:
    mark = f"7{os.getpid()}"
    with Caged(sandbox, Cage(), ["/bin/sh", "-c", f"sleep {mark} & sleep {mark} & echo up; wait"]) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {mark}" not in listed


def test_disk_is_bounded(sandbox: Sandbox) -> None:
    said = shell(sandbox, "head -c 100m /dev/zero > /tmp/large; wc -c < /tmp/large", Limits(disk=8 * 2**20))
    assert int(said.split()[-1]) <= 8 * 2**20


def test_refuses_where_nothing_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_probe", lambda *_: ({"network": False}, ""))
    module._find.cache_clear()
    try:
        with pytest.raises(UnavailableError, match="nothing on this machine holds"):
            verify(candidate(tmp_path / "plain", HERE / "honest" / "plain.cpp"), target())
    finally:
        module._find.cache_clear()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"op": "linear"}, "implements linear"),
        ({"source": "other.cpp"}, "other.cpp"),
        ({"phases": ["prefill"]}, "phases"),
        ({"activation_dtypes": ["bfloat16"]}, "float32"),
        ({"max_rows": -1}, "max_rows"),
        ({"max_rows": 10**9}, "0 covers any number"),
        ({"weight_formats": ["q8_0"]}, "q8_0"),
    ],
)
def test_malformed(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = candidate(tmp_path / "bad", HERE / "honest" / "plain.cpp", **changes)
    copy = tmp_path / "copy"
    copy.mkdir()
    with pytest.raises(Rejected) as caught:
        take(folder, target(), copy)
    assert caught.value.reason == "malformed" and words in caught.value.detail


def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "bad", HERE / "honest" / "plain.cpp")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.h"))).touch()
    verdict = verify(folder, target())
    assert verdict.reason == "malformed" and "printable" in verdict.detail


def test_more_memory_than_there_is() -> None:
    with pytest.raises(UnavailableError, match="GiB of inputs"):
        Memory.create("inputs", 1 << 60, writable=False)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_runner()
    monkeypatch.setenv("CXX", "no-such-compiler")
    verdict = verify(candidate(tmp_path / "plain", HERE / "honest" / "plain.cpp"), target())
    assert verdict.reason == "no_compiler"


def test_bad_flags(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "plain", HERE / "honest" / "plain.cpp", flags=["-fplugin=/tmp/x.so"])
    assert verify(folder, target()).reason == "compile_error"


def test_verdict_is_a_record(tmp_path: Path) -> None:
    verdict = verify(candidate(tmp_path / "crashes", HERE / "cheats" / "crashes.cpp"), target())
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=type(verdict)) == verdict
    assert verdict.reason == "crashed" and "SIGSEGV" in verdict.detail
