"""Prompts computed for other replicas: full blocks out, no token sampled.

    connector's thread           engine's thread, after each step
    start(job, stream)  ──┐
    room(key)             ├─► word left, wake() ─► advance(): sequence in the scheduler's line like any other;
    cancel(key)         ──┘                        what is computed (or was cached) ─► stream.send
                                                   all sent: stream.end(), blocks freed

A block stays in the sequence's table, so nobody can evict it, until its bytes are in the stream.
"""

from __future__ import annotations

from headrace.kvcache.connector import SendJob, SendStream


class Prefiller:
    """The engine's side of a connector's server (its ``SendHandler``); get it as ``Engine.prefiller``.

    ``start``, ``room`` and ``cancel`` may be called from any thread and return at once; the stream is written
    to from the engine's thread, between steps.
    """

    def start(self, job: SendJob, stream: SendStream) -> None:
        """Puts the job's prompt in line; a prompt that cannot be served ends the stream with the reason."""

    def room(self, key: str) -> None:
        """The job's stream has room again."""

    def cancel(self, key: str) -> None:
        """Ends a job and frees its blocks before the next step; unknown keys are ignored."""
