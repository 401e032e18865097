"""A real `headrace serve` as a child process, for tests that speak HTTP to it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.core.control import FromServer, ToServer, control_path
from headrace.core.wire import FrameDecoder, encode_frame

READY = re.compile(r"running on (http://\S+)")
COMMAND = [sys.executable, "-m", "headrace.cli.main"]


class Server:
    """``with Server("model", "--flag", "value") as server: ... server.url``."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.environment = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._told = False
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
        assert self.url, self.log
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def terminate(self) -> None:
        """SIGTERM; the second one has another meaning than the first."""
        self._told = True
        self.process.terminate()

    def stop(self) -> int:
        """SIGTERM unless it was sent already, then the exit code."""
        if not self._told and self.process.poll() is None:
            self.terminate()
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def descendants(self) -> dict[int, str]:
        """Processes under the server's, with their command lines."""
        found = {}
        waiting = [self.process.pid]
        while waiting:
            pid = waiting.pop()
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    children = [int(child) for child in path.read_text().split()]
                except OSError:
                    continue
                for child in children:
                    found[child] = command_line(child)
                    waiting.append(child)
        return found

    def pids(self, module: str) -> list[int]:
        """The server's processes that run a module of ours."""
        return sorted(pid for pid, command in self.descendants().items() if module in command.split())

    def replica_pid(self) -> int:
        """The one child of the server process that is a replica."""
        (pid,) = self.pids("headrace.replica")
        return pid

    def pid_of(self, replica: str) -> int:
        """The process that listens on a replica's socket."""
        folder = f"{self.environment['TMPDIR']}/"
        listening = set()
        for line in Path("/proc/net/unix").read_text().splitlines():
            columns = line.split()  # number, references, protocol, flags, type, state, inode, path
            if columns[-1].startswith(folder) and columns[-1].endswith(f"-{replica}.sock"):
                listening.add(f"socket:[{columns[6]}]")
        for pid in self.pids("headrace.replica"):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(entry) in listening:
                    return pid
        raise AssertionError(f"no process listens for {replica}")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `headrace ps`, `why`, `scale` or `reload` against this server."""
        return subprocess.run(
            [*COMMAND, *arguments, "--port", self.port],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def tell(self, message: ToServer) -> list[FromServer]:
        """What such a command does, without the start of a process: all that the server answers."""
        decoder: FrameDecoder[FromServer] = FrameDecoder(FromServer)
        replies: list[FromServer] = []
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(120)
            folder = self.environment["XDG_RUNTIME_DIR"]
            connection.connect(str(Path(folder) / control_path(int(self.port)).name))
            connection.sendall(encode_frame(message))
            while data := connection.recv(1 << 16):
                replies += decoder.feed(data)
        return replies

    def status(self) -> dict[str, Any]:
        """The FleetStatus, as `headrace ps --json` prints it."""
        done = self.command("ps", "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The fleet's replicas by id; fields that have their default are absent."""
        return {line["member"]["endpoint"]["replica_id"]: line for line in self.status()["replicas"]}


def command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Polls until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never became true: {what}"
        time.sleep(0.05)
