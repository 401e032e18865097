"""A folder that one server keeps its sockets in, and whether anything of it is left afterwards."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from tests.system.server import Server

SHARED_MEMORY = "/dev/shm/"


class Home:
    """Short, as the path of a Unix socket has to be; every process started in it can be told by its name."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
        (self.path / "run").mkdir(mode=0o700)
        (self.path / "tmp").mkdir(mode=0o700)
        self._segments: set[str] = set()

    def __enter__(self) -> Home:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "TMPDIR": str(self.path / "tmp"),
            "XDG_RUNTIME_DIR": str(self.path / "run"),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }

    def processes(self) -> dict[int, str]:
        """Processes that were started in it and have not ended, by their environment."""
        mark = f"TMPDIR={self.path}/tmp\0".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def sockets(self) -> list[Path]:
        """Every socket file in it."""
        return [path for path in self.path.rglob("*") if path.is_socket()]

    def note_segments(self) -> None:
        """Remembers which shared memory its processes use now."""
        for pid in self.processes():
            try:
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            except OSError:
                continue
            self._segments |= {line.split()[-1] for line in lines if SHARED_MEMORY in line}

    def stop(self, server: Server) -> None:
        """Stops the server, and finds nothing of it left."""
        self.note_segments()
        assert self.sockets() and len(self.processes()) > 1, "looks in the right places"
        self.check_nothing_left(server)

    def check_nothing_left(self, server: Server) -> None:
        """The server stops, or has stopped, as it should: no process, shared memory, socket or folder of
        it is there any more."""
        assert server.stop() == 0, server.log
        assert self.processes() == {}
        assert [path for path in self._segments if Path(path).exists()] == []
        assert self.sockets() == []
        assert list((self.path / "tmp").iterdir()) == [] and list((self.path / "run").iterdir()) == []
