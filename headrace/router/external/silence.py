"""Notices a server that holds requests and has gone silent.

A long prompt may take minutes before its first byte, so that silence alone is no fault: the server is asked
whether it is there, and given up when it does not answer. It is asked early where a first byte is overdue by
what was predicted of it, and with more patience in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from headrace.router.external.http_client import Call, HTTPClient, HTTPFailure

PROBE_TIMEOUT_S = 10.0
NUM_PROBES = 3
EARLY_PROBE_TIMEOUT_S = 2.5
NUM_EARLY_PROBES = 2
LOOK_S = 1.0
ASK_AGAIN_S = 5.0
MIN_PATIENCE_S = 5.0
PATIENCE = 4.0
"""So many times the predicted time a first byte may take before the server is asked after."""


def patience_of(ttft_s: float) -> float:
    """Seconds that the first byte may take, predicted after ``ttft_s``."""
    return max(MIN_PATIENCE_S, PATIENCE * ttft_s)


class SilenceWatch:
    """Fails the calls of one client that have heard nothing for ``silence_s``, or for their ``patience_s``
    before the first byte, from a server that is gone."""

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
        ask_at = 0.0
        while True:
            await asyncio.sleep(min(LOOK_S, self._silence_s / 4))
            silent = [call for call in self._client.calls if self._is_silent(call)]
            if not silent or self._loop.time() < ask_at:
                continue
            is_late = any(self._silent_for(call) >= self._silence_s for call in silent)
            if await self._answers(is_late):
                ask_at = self._loop.time() + min(ASK_AGAIN_S, self._silence_s / 4)
                continue
            url = self._client.base.url
            self._log.error("%s holds %d requests and does not answer", url, len(silent))
            for call in silent:
                if self._is_silent(call):
                    message = f"{url} does not answer: not a byte for {self._silent_for(call):.1f} s"
                    call.fail(HTTPFailure("closed", message))

    def _silent_for(self, call: Call) -> float:
        return self._loop.time() - call.heard_at

    def _is_silent(self, call: Call) -> bool:
        limit = self._silence_s if call.heard else min(self._silence_s, call.patience_s)
        return not call.paused and not call.ended and self._silent_for(call) >= limit

    async def _answers(self, is_late: bool) -> bool:
        """Any answer at all counts, a 404 included."""
        num_probes = NUM_PROBES if is_late else NUM_EARLY_PROBES
        timeout = PROBE_TIMEOUT_S if is_late else EARLY_PROBE_TIMEOUT_S
        for _ in range(num_probes):
            try:
                await self._client.fetch("GET", "/health", timeout=min(timeout, self._silence_s))
            except HTTPFailure:
                continue
            return True
        return False
