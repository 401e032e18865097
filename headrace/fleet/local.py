"""Replica processes on this machine: started, watched, restarted with back-off, stopped.

LocalReplica ──spawns──► python -m headrace.replica
    stdin   a ReplicaSpec; stays open, so that EOF tells the child its parent is gone
    stdout  StartEvents
    stderr  inherited: the child's log
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.core import errors
from headrace.core.knobs import EngineConfig, LogConfig
from headrace.core.launch import StartEvent, ReplicaSpec

log = logging.getLogger("headrace.fleet")

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0
STOP_MARGIN_S = 5.0

# What an engine's process is started with, unless the user set it otherwise.
#   GLIBC_TUNABLES, THP_MEM_ALLOC_ENABLE   weights in pages of 2 MiB, from malloc and from torch's own
#       allocator: read a tenth to a fifth faster where the system grants huge pages on request only
#   GOMP_SPINCOUNT   threads spin for about 100 µs at a barrier, then sleep. libgomp's default spins for
#       milliseconds, so that a busy neighbour stalls every step; sleeping sooner costs quiet cores a fifth
ENGINE_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "GOMP_SPINCOUNT": "5000",
}


def engine_environment() -> dict[str, str]:
    """This process's environment with ENGINE_ENVIRONMENT under it; a wait policy of the user's stands."""
    defaults = dict(ENGINE_ENVIRONMENT)
    if "OMP_WAIT_POLICY" in os.environ:
        del defaults["GOMP_SPINCOUNT"]
    return defaults | os.environ


class LocalReplica:
    """One supervised replica process.

    ``start`` returns once the first process is ready and raises what it failed with; after that, a
    process that ends by itself is replaced, after a pause that doubles until one has lived a while.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        model: str,
        folder: Path,
        revision: str,
        engine: EngineConfig,
        logs: LogConfig | None = None,
        on_loading: Callable[[int, int], None] | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-")
        self.spec = ReplicaSpec(
            replica_id=replica_id,
            model=model,
            folder=str(folder),
            revision=revision,
            socket=str(Path(self._directory.name) / "replica.sock"),
            engine=engine,
            logs=logs or LogConfig(),
        )
        self._on_loading = on_loading
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False
        self.num_restarts = 0

    @property
    def socket(self) -> str:
        return self.spec.socket

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises the replica's own StartupError, or EngineError if it died without a word."""
        try:
            await self._spawn()
        except BaseException:
            self._stopping = True
            await self._end_process(0.0)
            self._directory.cleanup()
            raise
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.spec.replica_id}")

    async def stop(self, grace_s: float) -> None:
        """Lets running requests finish for ``grace_s`` seconds, then ends the process."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self._end_process(grace_s)
        self._directory.cleanup()

    def kill(self, pid: int) -> None:
        """Ends the process of that pid if it is the present one, which is then replaced."""
        process = self._process
        if process is not None and process.pid == pid and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _spawn(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.replica",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=engine_environment(),
            # Ctrl+C belongs to the parent, which then drains the children one by one.
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(self.spec) + b"\n")
        decoder = msgspec.json.Decoder(StartEvent)
        try:
            await process.stdin.drain()
            while line := await process.stdout.readline():
                event = decoder.decode(line)
                if event.event == "ready":
                    return
                if event.event == "error":
                    raise event.to_error()
                if event.event == "loading" and self._on_loading is not None:
                    self._on_loading(event.done, event.total)
        except (BrokenPipeError, ConnectionResetError, msgspec.DecodeError) as error:
            log.debug("replica start: %s", error)
        code = await process.wait()
        raise errors.EngineError(
            f"replica {self.spec.replica_id} ended while starting ({describe_exit(code)})",
            hint="its last words are above; if it was killed by the system, memory ran out: "
            "lower --max-model-len or --kv-cache-gib",
        )

    async def _watch(self) -> None:
        pause = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while not self._stopping:
            assert self._process is not None
            born = loop.time()
            code = await self._process.wait()
            if loop.time() - born > STABLE_AFTER_S:
                pause = FIRST_BACKOFF_S
            log.error(
                "replica %s died (%s); restarting in %.1f s",
                self.spec.replica_id,
                describe_exit(code),
                pause,
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_BACKOFF_S)
            self.num_restarts += 1
            try:
                await self._spawn()
            except (errors.HeadraceError, OSError, ValueError) as error:
                # OSError: no process to be had just now, as when memory is short
                log.error("replica %s did not start: %s", self.spec.replica_id, error)
                await self._end_process(0.0)
            else:
                log.info("replica %s is back", self.spec.replica_id)

    async def _end_process(self, grace_s: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s + STOP_MARGIN_S)
        except TimeoutError:
            log.warning("replica %s did not drain in %.0f s: killed", self.spec.replica_id, grace_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def describe_exit(code: int) -> str:
    """A process's exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
