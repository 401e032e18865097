"""Light streams beside the one that matters, in a process of their own so that nothing else delays them.

    python -m benchmarks.sides.streams URL MODEL COUNT

Answers {"op": "times"} with each stream's arrival times of text (the machine's monotonic clock) and starts
afresh; ends on EOF.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

from benchmarks.sides import protocol
from headrace.bench.load import StreamReader, check_loopback, open_session, send

OUTPUT_TOKENS = 4000


class Streams:
    """``count`` endless streams in a thread; ``runs`` holds one list of times per stream begun."""

    def __init__(self, url: str, model: str, count: int) -> None:
        check_loopback(url)
        self._url = url + "/v1/completions"
        self._model = model
        self._count = count
        self._lock = threading.Lock()
        self._runs: list[list[float]] = []
        self.errors: list[str] = []
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until every stream has flowed; raises when one failed or none came in time."""
        until = time.monotonic() + seconds
        while sum(len(run) > 2 for run in self._runs) < self._count:
            if self.errors or time.monotonic() > until:
                raise RuntimeError(self.errors[0] if self.errors else "the light streams did not start")
            time.sleep(0.05)

    def take(self) -> dict[str, Any]:
        """Times since the last call, one list per stream, each beginning with its last earlier time."""
        with self._lock:
            taken = [list(run) for run in self._runs]
            for run in self._runs:
                del run[:-1]
        return {"streams": [run for run in taken if len(run) > 1], "errors": self.errors}

    async def _run(self) -> None:
        async with open_session() as session:
            await asyncio.gather(*(self._stream(session, index) for index in range(self._count)))

    async def _stream(self, session: Any, index: int) -> None:
        while not self.errors:
            run: list[float] = []
            with self._lock:
                self._runs.append(run)

            def on_text(now: float, run: list[float] = run) -> None:
                with self._lock:
                    run.append(now)

            body = {
                "model": self._model,
                "prompt": f"Stream {index} tells a long story about",
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 1.0,
                "seed": index,
                "ignore_eos": True,
                "stream": True,
            }
            reader = StreamReader(on_text)
            trace = await send(session, self._url, body, timeout_s=1800, reader=reader)
            if trace.error is not None:
                self.errors.append(trace.error)


def main(url: str, model: str, count: str) -> None:
    channel = protocol.answers()
    streams = Streams(url, model, int(count))
    try:
        streams.wait(120)
    except RuntimeError as error:
        channel.write(json.dumps({"event": "error", "message": str(error)}) + "\n")
        return
    channel.write(json.dumps({"event": "ready"}) + "\n")
    for _ in sys.stdin:
        channel.write(json.dumps(streams.take()) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
