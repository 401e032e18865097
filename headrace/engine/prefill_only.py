"""Prompts computed for other replicas: full blocks out, no token sampled.

    connector's thread            engine's thread
    start(job, stream)  ──┐
    room(key)             ├─► word left, wake() ─► take_word(): a sequence in the scheduler's line like any
    cancel(key)         ──┘                        other; advance(): what is computed, or was cached ─► Sender
                                                   all of it sent: blocks freed

The sequence runs until its last block is in the stream, so nobody can evict what is still to be sent. If it
is preempted meanwhile, it computes again what the cache has lost, and goes on where it was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.core.errors import HeadraceError
from headrace.core.request import Request, SamplingParams
from headrace.engine.scheduler import Scheduler
from headrace.engine.sender import Outgoing, Sender
from headrace.engine.sequence import Sequence as Prompt
from headrace.engine.sequence import SequenceStatus
from headrace.kvcache.connector import SendJob, SendStream

# A receiver that has had no room for so long while blocks were ready for it does not get them any more.
LEASE_S = 15.0
# No caller can choose a request's name that begins so.
_PREFIX = "\0prefill/"


@dataclass
class _Job:
    prompt: Prompt
    outgoing: Outgoing
    num_offered: int  # leading blocks that the sender was given, or the receiver has
    told_computed: bool = False


class Prefiller:
    """The engine's side of a connector's server (its ``SendHandler``); get it as ``Engine.prefiller``.

    ``start``, ``room`` and ``cancel`` may be called from any thread and return at once; the stream is written
    to from the engine's thread, between steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        read: Callable[[Sequence[int]], list[bytearray]],
        block_bytes: int,
        check: Callable[[Request], None],
        wake: Callable[[], None],
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read`` copies blocks out of the cache, from any thread; ``check`` raises HeadraceError for a
        prompt that the model cannot take. Without a thread, blocks are sent in ``advance``."""
        self._scheduler = scheduler
        self._block_bytes = block_bytes
        self._sender = Sender(read=read, wake=wake, threaded=threaded, clock=clock)
        self._threaded = threaded
        self._check = check
        self._wake = wake
        self._clock = clock
        self._word: deque[tuple[SendJob, SendStream] | str] = deque()  # jobs to start, keys to cancel
        self._jobs: dict[str, _Job] = {}
        self._refusal = ""

    @property
    def has_word(self) -> bool:
        """Whether other threads left something that ``take_word`` has not seen."""
        return bool(self._word)

    @property
    def num_sent_blocks(self) -> int:
        return self._sender.num_sent_blocks

    @property
    def num_sent_bytes(self) -> int:
        return self._sender.num_sent_blocks * self._block_bytes

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def prompts(self) -> list[Prompt]:
        """What it works on, in order of arrival."""
        return [job.prompt for job in self._jobs.values()]

    def start(self, job: SendJob, stream: SendStream) -> None:
        """Puts the job's prompt in line; a prompt that cannot be served ends the stream with the reason."""
        self._word.append((job, stream))
        self._wake()

    def room(self, key: str) -> None:
        """The job's stream has room again."""
        self._sender.notice()

    def cancel(self, key: str) -> None:
        """Ends a job and frees its blocks before the next step; unknown keys are ignored."""
        self._word.append(key)
        self._wake()

    def refuse(self, reason: str) -> None:
        """Ends all jobs, and each that comes from now on, with this reason."""
        self._refusal = reason
        for job in list(self._jobs.values()):
            self._end(job, reason)

    def close(self) -> None:
        """Ends all jobs and the sender's thread."""
        self.refuse("the replica stops")
        self._sender.close()

    def take_word(self) -> None:
        """Starts and cancels what other threads asked for; to be called before each step."""
        while self._word:
            word = self._word.popleft()
            if isinstance(word, str):
                job = self._jobs.get(_PREFIX + word)
                if job is not None:
                    self._end(job, "cancelled")
            else:
                self._begin(*word)

    def advance(self) -> None:
        """Offers what is computed by now, and ends what is sent; to be called after each step."""
        for job in list(self._jobs.values()):
            prompt = job.prompt
            if prompt.status is SequenceStatus.RUNNING:
                self._offer(job)
            elif prompt.status is SequenceStatus.FINISHED:  # somebody else ended it
                self._end(job, "the prompt could not be computed")
        if not self._threaded:
            self._sender.pump()
        now = self._clock()
        for job in list(self._jobs.values()):
            outgoing = job.outgoing
            if outgoing.num_sent == _num_blocks(job):
                self._end(job, "")
            elif not outgoing.ready:
                outgoing.last_progress = now  # it waits for us, not we for the receiver
            elif now > outgoing.last_progress + LEASE_S:
                self._end(job, f"the receiver took nothing for {LEASE_S:g} s")

    def failed(self, prompt: Prompt, reason: str) -> None:
        """Ends the job of a prompt that the model could not compute."""
        job = self._jobs.get(prompt.request_id)
        if job is not None:
            self._end(job, reason)

    def wait_s(self) -> float | None:
        """Seconds until there is something to do for ``advance``, beside what a step or a call brings."""
        if self._word:
            return 0.0
        return min((self._wait_s(job) for job in self._jobs.values()), default=None)

    def check_integrity(self) -> None:
        """Asserts that nothing is offered or sent which is not there."""
        for job in self._jobs.values():
            assert job.outgoing.num_sent <= job.num_offered <= _num_blocks(job)
            assert job.prompt.status is SequenceStatus.RUNNING or not job.outgoing.ready

    def _wait_s(self, job: _Job) -> float:
        outgoing = job.outgoing
        if outgoing.num_sent == _num_blocks(job) or (
            not self._threaded and outgoing.ready and outgoing.stream.room() > 0
        ):
            return 0.0
        return max(0.001, outgoing.last_progress + LEASE_S - self._clock())

    def _begin(self, send: SendJob, stream: SendStream) -> None:
        block_size = self._scheduler.config.block_size
        request_id = _PREFIX + send.key
        num_blocks = len(send.tokens) // (4 * block_size)
        if self._refusal or not self._scheduler.config.enable_prefix_caching:
            stream.end(self._refusal or "this replica keeps no prefixes")
            return
        if send.first >= num_blocks:
            stream.end()
            return
        request = Request(
            request_id=request_id,
            prompt=send.tokens[: 4 * block_size * num_blocks],
            sampling=SamplingParams(max_tokens=1),
        )
        try:
            self._check(request)
            prompt = self._scheduler.add_prefill(request)
        except HeadraceError as error:
            stream.end(error.message)
            return
        job = _Job(prompt, Outgoing(stream, send.first, self._clock()), send.first)
        self._jobs[request_id] = job
        prompt.on_release = partial(self._withdraw, job)

    def _offer(self, job: _Job) -> None:
        prompt = job.prompt
        if not prompt.caches_blocks:
            self._end(job, "the replica's weights or kernels changed")
            return
        if prompt.num_computed_tokens == len(prompt.tokens) and not job.told_computed:
            job.told_computed = True
            job.outgoing.stream.computed()
        first, last = job.num_offered, prompt.num_computed_tokens // self._scheduler.config.block_size
        if first < last:
            job.num_offered = last
            blocks = zip(prompt.block_ids[first:last], prompt.block_table[first:last], strict=True)
            self._sender.offer(job.outgoing, list(blocks))

    def _withdraw(self, job: _Job) -> None:
        """Its blocks are about to be freed."""
        self._sender.withdraw(job.outgoing)
        job.num_offered = job.outgoing.num_sent

    def _end(self, job: _Job, reason: str) -> None:
        if self._jobs.pop(job.prompt.request_id, None) is None:
            return
        self._withdraw(job)
        job.outgoing.stream.end(reason)
        if job.prompt.status is SequenceStatus.RUNNING:
            self._scheduler.finish(job.prompt)
        elif job.prompt.status is not SequenceStatus.FINISHED:
            self._scheduler.abort(job.prompt.request_id)


def _num_blocks(job: _Job) -> int:
    return len(job.prompt.block_ids)
