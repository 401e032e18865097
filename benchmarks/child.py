"""A side's processes as the bench holds them: started, asked, stopped while others are measured, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class ChildError(Exception):
    """The side failed, answered wrongly or not in time."""


class ProcessTree:
    """One process that we started, and its descendants."""

    def __init__(
        self, command: list[str], *, environment: dict[str, str], log: Path, piped: bool, nice: int
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._nice = nice
        self._log_path = log
        self.spawned_at = time.perf_counter()
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                niced(command, nice),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else stream,
                stderr=stream,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def pause(self) -> None:
        """Takes all of it off the processors, whatever its idle threads would do."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on, each of its sessions at the niceness it was started with."""
        self._reach_sessions()
        self._signal(signal.SIGCONT)

    def peak_memory(self) -> int:
        """Sum over the tree of each process's highest resident set, in bytes."""
        return sum(map(_highest_resident_set, process_tree(self.pid)))

    def close(self) -> None:
        """Ends it: asks, then insists."""
        members = process_tree(self.pid)
        if self.process.poll() is None:
            self.resume()
            self._ask_to_end()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                members = process_tree(self.pid)
                self.process.kill()
                self.process.wait(10)
                for member in members[1:]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def tail(self) -> str:
        """The last words on its stderr."""
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:]) or "nothing in its log"

    def _reach_sessions(self) -> None:
        """A session that a descendant opened begins at niceness 0 between sessions."""
        if self._nice:
            for member in process_tree(self.pid):
                with contextlib.suppress(OSError):
                    Path(f"/proc/{member}/autogroup").write_text(str(self._nice))

    def _ask_to_end(self) -> None:
        self.process.terminate()

    def _signal(self, number: signal.Signals) -> None:
        for member in process_tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)


class Child(ProcessTree):
    """A side behind ``sides.protocol``. ``spawn_seconds``: from the spawn until it said it was ready."""

    def __init__(
        self,
        command: list[str],
        *,
        environment: dict[str, str],
        log: Path,
        timeout: float,
        nice: int = 0,
    ) -> None:
        super().__init__(command, environment=environment, log=log, piped=True, nice=nice)
        self._buffer = b""
        try:
            self.ready = self._read(timeout)
            if self.ready.get("event") != "ready":
                raise ChildError(str(self.ready.get("message", self.ready)))
        except BaseException:
            self.close()
            raise
        self.spawn_seconds = time.perf_counter() - self.spawned_at

    def ask(self, command: dict[str, Any], timeout: float = 180.0) -> dict[str, Any]:
        """One command, one answer; raises ChildError on a failure or a time-out."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ChildError(f"the process is gone: {self.tail()}") from error
        answer = self._read(timeout)
        if "error" in answer:
            raise ChildError(str(answer["error"]))
        return answer

    def _ask_to_end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise ChildError(f"no answer within {timeout:.0f} s: {self.tail()}")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise ChildError(f"the process ended: {self.tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server(ProcessTree):
    """An HTTP server of a side on 127.0.0.1. ``spawn_seconds``: until ``ready_path`` answered 200."""

    def __init__(
        self,
        command: list[str],
        *,
        port: int,
        environment: dict[str, str],
        log: Path,
        timeout: float,
        ready_path: str = "/health",
        nice: int = 0,
    ) -> None:
        super().__init__(command, environment=environment, log=log, piped=False, nice=nice)
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + timeout
        try:
            while not _answers_ok(self.url + ready_path):
                if self.process.poll() is not None:
                    raise ChildError(f"the server ended: {self.tail()}")
                if time.monotonic() > deadline:
                    raise ChildError(f"not ready within {timeout:.0f} s: {self.tail()}")
                self._reach_sessions()
                time.sleep(0.05)
        except BaseException:
            self.close()
            raise
        self.spawn_seconds = time.perf_counter() - self.spawned_at


def niced(command: list[str], nice: int) -> list[str]:
    """``command`` at that niceness, within its session and (Linux's autogroups) between sessions."""
    script = 'echo "$0" > /proc/self/autogroup 2>/dev/null; exec nice -n "$0" "$@"'
    return ["sh", "-c", script, str(nice), *command] if nice else command


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def process_tree(pid: int) -> list[int]:
    """``pid`` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for member in tree:
        tree.extend(children.get(member, []))
    return tree


def _highest_resident_set(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
