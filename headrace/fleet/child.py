"""A process of ours on this machine: started, watched, restarted with back-off, stopped.

Child ──spawns──► python -m MODULE
    stdin   its spec, one JSON line; stays open, so that EOF tells the child its parent is gone
    stdout  StartEvents
    stderr  inherited: the child's log
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from headrace.core import errors
from headrace.core.launch import StartEvent
from headrace.core.words import describe_exit

log = logging.getLogger("headrace.fleet")

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0
STOP_MARGIN_S = 5.0


class Child:
    """One supervised process.

    ``start`` returns once the first process is ready and raises what it failed with; after that, a
    process that ends by itself is replaced, after a pause that doubles until one has lived a while.
    """

    def __init__(
        self,
        name: str,
        module: str,
        spec: msgspec.Struct,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        hint: Callable[[int], str] | None = None,
        on_loading: Callable[[int, int], None] | None = None,
        on_restart: Callable[[], None] | None = None,
    ) -> None:
        """``hint`` is for a process that ends while starting without having said why: by its exit status,
        negative for a signal. ``on_restart`` is called before each attempt to replace one that ended."""
        self.name = name
        self.num_restarts = 0
        self._module = module
        self._spec = spec
        self._environment = environment
        self._pass_fds = pass_fds
        self._hint = hint
        self._on_loading = on_loading
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False
        self._ready = False

    @property
    def ready(self) -> bool:
        """Whether the present process has said so and has not ended since."""
        return self._ready and self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises the process's own StartupError, or EngineError if it died without a word."""
        try:
            await self._spawn()
        except BaseException:
            self._stopping = True
            await self._end_process(0.0)
            raise
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.name}")

    async def stop(self, grace_s: float) -> None:
        """Lets it finish what it does for ``grace_s`` seconds, then ends it; also while it starts."""
        self._stopping = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        await self._end_process(grace_s)

    def become(self, spec: msgspec.Struct) -> None:
        """What later processes of it are told."""
        self._spec = spec

    def kill(self, pid: int) -> None:
        """Ends the process of that pid if it is the present one, which is then replaced."""
        process = self._process
        if process is not None and process.pid == pid and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _spawn(self) -> None:
        self._ready = False
        process = await self._create()
        if self._stopping:  # while there was no process yet to be stopped
            await self._end_process(0.0)
        assert process.stdin is not None and process.stdout is not None
        decoder = msgspec.json.Decoder(StartEvent)
        try:
            process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
            await process.stdin.drain()
            while line := await process.stdout.readline():
                event = decoder.decode(line)
                if event.event == "ready":
                    self._ready = True
                    return
                if event.event == "error":
                    raise event.to_error()
                if event.event == "loading" and self._on_loading is not None:
                    self._on_loading(event.done, event.total)
        except (BrokenPipeError, ConnectionResetError, msgspec.DecodeError) as error:
            log.debug("%s: %s", self.name, error)
            await self._end_process(0.0)
        code = await process.wait()
        hint = None if self._hint is None else self._hint(code)
        raise errors.EngineError(f"{self.name} ended while starting ({describe_exit(code)})", hint=hint)

    async def _create(self) -> asyncio.subprocess.Process:
        creating = asyncio.create_task(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=self._environment,
                pass_fds=self._pass_fds,
                # Ctrl+C belongs to the parent, which then drains the children one by one.
                start_new_session=True,
            )
        )
        try:
            # Whoever is cancelled in the middle would leave a process behind that nobody knows.
            await asyncio.wait({creating})
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._process = await creating
            raise
        self._process = creating.result()
        return self._process

    async def _watch(self) -> None:
        pause = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while True:
            assert self._process is not None
            born = loop.time()
            code = await self._process.wait()
            if loop.time() - born > STABLE_AFTER_S:
                pause = FIRST_BACKOFF_S
            log.error("%s died (%s); restarting in %.1f s", self.name, describe_exit(code), pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_BACKOFF_S)
            self.num_restarts += 1
            if self._on_restart is not None:
                self._on_restart()
            try:
                await self._spawn()
            except (errors.HeadraceError, OSError, ValueError) as error:
                # OSError: no process to be had just now, as when memory is short
                log.error("%s did not start: %s", self.name, error)
                await self._end_process(0.0)
            else:
                log.info("%s is back", self.name)

    async def _end_process(self, grace_s: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s + STOP_MARGIN_S)
        except TimeoutError:
            log.warning("%s did not end within %.0f s: killed", self.name, grace_s + STOP_MARGIN_S)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def start_all(children: Iterable[Child]) -> None:
    """Starts them, one at least, side by side; when one fails, ends the others and raises what it said."""
    children = list(children)
    tasks = [asyncio.create_task(child.start()) for child in children]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stop_all(children, 0.0)
        raise


async def stop_all(children: Iterable[Child], grace_s: float) -> None:
    """Stops them side by side."""
    await asyncio.gather(*(child.stop(grace_s) for child in children))
