"""Notices a server that holds requests and has gone silent.

A long prompt may take minutes before its first byte, so that silence alone is no fault: the server is asked
whether it is there, and given up when it does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from headrace.router.external.http_client import Call, HTTPClient, HTTPFailure

PROBE_TIMEOUT_S = 10.0
NUM_PROBES = 3


class SilenceWatch:
    """Fails the calls of one client that have heard nothing for ``silence_s`` from a server that is gone."""

    def __init__(self, client: HTTPClient, silence_s: float, *, log: logging.Logger) -> None:
        self._client = client
        self._silence_s = silence_s
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="external-silence")

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / 4)
            silent = [call for call in self._client.calls if self._is_silent(call)]
            if silent and not await self._answers():
                url = self._client.base.url
                self._log.error("%s holds %d requests and does not answer", url, len(silent))
                message = f"{url} does not answer: not a byte for {self._silence_s:g} s"
                for call in silent:
                    if self._is_silent(call):
                        call.fail(HTTPFailure("closed", message))

    def _is_silent(self, call: Call) -> bool:
        return not call.paused and self._loop.time() - call.heard_at >= self._silence_s

    async def _answers(self) -> bool:
        """Any answer at all counts, a 404 included."""
        for _ in range(NUM_PROBES):
            try:
                await self._client.fetch("GET", "/health", timeout=min(PROBE_TIMEOUT_S, self._silence_s))
            except HTTPFailure:
                continue
            return True
        return False
