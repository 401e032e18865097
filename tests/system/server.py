"""A real `headrace serve` as a child process, for tests that speak HTTP to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

READY = re.compile(r"running on (http://\S+)")


class Server:
    """``with Server("model", "--flag", "value") as server: ... server.url``."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "headrace.cli.main", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := READY.search(line):
                self.url = found[1]
                self._settled.set()
        self._settled.set()

    def __enter__(self) -> Server:
        self._settled.wait(timeout=240)
        assert self.url, "\n".join(self.lines)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def replica_pid(self) -> int:
        """The one child of the server process that is a replica."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            if b"headrace.replica" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("no replica process")
