"""Files of others are read whole or refused in words; nothing waits for a pipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.core.errors import PackError
from headrace.core.files import read_regular
from headrace.core.signatures import check_signed


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_regular(path, 4) == b"1234"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_regular(link, 4) == b"1234"
    with pytest.raises(OSError, match="larger than"):
        read_regular(path, 3)
    os.mkfifo(tmp_path / "pipe")
    num_open = len(os.listdir("/proc/self/fd"))
    for other in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="no regular file"):
            read_regular(other, 4)
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("name", ["pack.json", "signature.json"])
def test_a_pack_that_is_a_pipe(tmp_path: Path, name: str) -> None:
    (tmp_path / "pack.json").write_text("{}")
    (tmp_path / "signature.json").write_text("{}")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(PackError, match="no regular file"):
        check_signed(tmp_path)
