"""The gateways that ``scripts/bench gateway`` puts between one load generator and mock backends.

core 1: load generator, mock backends          core 0: the gateway under test, alone
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from benchmarks.child import niced
from benchmarks.peers import cache_root, peers_root
from headrace.core.errors import EngineError, UsageError

GATEWAY_CORE = 0
HARNESS_CORE = 1
NUM_BACKENDS = 4
START_TIMEOUT_S = 90.0
MODEL = "mock"
_HARNESS = Path(__file__).resolve().parent / "harness"


@dataclass(frozen=True)
class Side:
    """``command(port, targets, scratch)`` starts it on ``port``; ``mode`` says what stands behind it."""

    name: str
    mode: str  # "text": OpenAI backends; "token": replicas of our own wire
    command: Callable[[int, Sequence[str], Path], list[str]]
    installed: Callable[[], bool] = lambda: True


def _headrace_text(port: int, urls: Sequence[str], scratch: Path) -> list[str]:
    flags = [flag for url in urls for flag in ("--worker-urls", url)]
    return [sys.executable, "-m", "headrace.cli.main", "serve", *flags, "--port", str(port)]


def _headrace_token(port: int, sockets: Sequence[str], scratch: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.sides.token_gateway", str(port), MODEL, *sockets]


def _rust(package: str, program: str, policy: str, *words: str) -> Side:
    path = peers_root() / package / "bin" / program

    def command(port: int, urls: Sequence[str], scratch: Path) -> list[str]:
        return [
            *(str(path), *words, "--worker-urls", *urls, "--policy", policy, "--host", "127.0.0.1"),
            *("--port", str(port), "--prometheus-port", str(free_port())),
        ]

    name = package if policy == "cache_aware" else f"{package} {policy}"
    return Side(name, "text", command, path.exists)


def _litellm(port: int, urls: Sequence[str], scratch: Path) -> list[str]:
    lines = ["model_list:"]
    for url in urls:
        lines += [
            f"  - model_name: {MODEL}",
            f"    litellm_params: {{model: openai/{MODEL}, api_base: '{url}/v1', api_key: none}}",
        ]
    # it asks for a key of its own otherwise, which the load generator has not
    lines.append("general_settings: {dangerously_permit_weak_or_unset_master_key: true}")
    config = scratch / "litellm.yaml"
    config.write_text("\n".join(lines) + "\n")
    program = peers_root() / "litellm" / "bin" / "litellm"
    return [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


SIDES = (
    Side("headrace text", "text", _headrace_text),
    Side("headrace token", "token", _headrace_token),
    _rust("vllm-router", "vllm-router", "cache_aware"),
    _rust("vllm-router", "vllm-router", "round_robin"),
    _rust("smg", "smg", "cache_aware", "launch"),
    _rust("sglang-router", "sglang-router", "cache_aware", "launch"),
    Side("litellm", "text", _litellm, lambda: (peers_root() / "litellm" / "bin" / "litellm").exists()),
)


class Running:
    """A process of ours on one core, with whatever it started; its CPU time in seconds."""

    def __init__(self, command: list[str], core: int, log: Path, nice: int) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                niced(["taskset", "-c", str(core), *command], nice),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def cpu_seconds(self) -> float:
        """User and system time of the process and its living descendants."""
        parents: dict[int, list[int]] = {}
        ticks: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
        total, left = 0, [self.process.pid]
        while left:
            pid = left.pop()
            total += ticks.get(pid, 0)
            left += parents.get(pid, [])
        return total / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                try:
                    os.killpg(self.process.pid, number)
                    self.process.wait(timeout=15)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-800:].strip()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def build_harness() -> dict[str, Path]:
    """The three C programs, compiled once for their source; UsageError without a compiler."""
    programs = {}
    for source in sorted(_HARNESS.glob("*.c")):
        digest = sha256(source.read_bytes()).hexdigest()[:16]
        program = cache_root() / "bench" / "harness" / f"{source.stem}-{digest}"
        programs[source.stem] = program
        if program.exists():
            continue
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise UsageError("the load generator is C and no compiler was found", hint="apt-get install gcc")
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(".new")
        subprocess.run([compiler, "-O2", "-o", str(unfinished), str(source)], check=True)
        unfinished.rename(program)
    return programs


@contextmanager
def backends(
    program: Path, itl_us: int, num_tokens: int, scratch: Path, nice: int = 0
) -> Iterator[tuple[Running, list[str]]]:
    """Mock OpenAI backends and their base URLs."""
    ports = [free_port() for _ in range(NUM_BACKENDS)]
    command = [str(program), str(itl_us), str(num_tokens), *map(str, ports)]
    running = Running(command, HARNESS_CORE, scratch / "backend.log", nice)
    try:
        for port in ports:
            _wait(running, f"http://127.0.0.1:{port}/v1/models")
        yield running, [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        running.stop()


@contextmanager
def replicas(
    program: Path, itl_us: int, num_tokens: int, scratch: Path, nice: int = 0
) -> Iterator[tuple[Running, list[str]]]:
    """Mock replicas of our own wire and their socket paths."""
    from benchmarks.sides.token_gateway import first_token_id, write_hello

    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    hellos = [folder / f"hello-{index}" for index in range(NUM_BACKENDS)]
    for index, path in enumerate(hellos):
        write_hello(path, f"mock-{index}", MODEL)
    command = [str(program), str(itl_us), str(num_tokens), str(first_token_id(num_tokens)), *map(str, hellos)]
    running = Running(command, HARNESS_CORE, scratch / "replica.log", nice)
    sockets = [f"{path}.sock" for path in hellos]
    try:
        deadline = time.monotonic() + 10
        while not all(Path(path).exists() for path in sockets):
            if time.monotonic() > deadline or running.process.poll() is not None:
                raise EngineError(f"the mock replicas did not start: {running.last_words()}")
            time.sleep(0.01)
        yield running, sockets
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def gateway(
    side: Side, targets: Sequence[str], scratch: Path, nice: int = 0
) -> Iterator[tuple[Running, int]]:
    """The side's gateway in front of ``targets``, answering chat requests; EngineError if it does not."""
    port = free_port()
    log = scratch / f"{side.name.replace(' ', '-')}.log"
    running = Running(side.command(port, targets, scratch), GATEWAY_CORE, log, nice)
    try:
        _wait(running, f"http://127.0.0.1:{port}/v1/chat/completions", body=_QUESTION)
        yield running, port
    finally:
        running.stop()


_QUESTION = (
    b'{"model":"%b","stream":true,"max_tokens":32,"messages":[{"role":"user","content":"hello"}]}'
    % MODEL.encode()
)


def _wait(running: Running, url: str, body: bytes | None = None) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                response.read()
            return
        except OSError as error:
            if running.process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"{url} does not answer ({error}): {running.last_words()}") from None
            time.sleep(0.1)
