"""What comes back for the requests that one caller submitted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from headrace.core.errors import HeadraceError, OverloadedError
from headrace.core.messages import Output

if TYPE_CHECKING:
    from types import TracebackType

TOKEN_BYTES = 200
"""What one unread token is counted as: about one event of a chat stream."""

LOGPROB_BYTES = 80


class Owner(Protocol):
    """What a stream needs of its client."""

    def send_abort(self, request_id: str, sample_index: int | None = None) -> None: ...
    def forget(self, request_id: str) -> None: ...


class ReplicaStream:
    """An async iterator over lists of Outputs, for one reader; a context manager that aborts on exit.

    It ends when every sample has ended, and raises HeadraceError when a request has failed: then all of
    its requests are aborted. Outputs that wait to be read are bounded by ``max_backlog_bytes``, counted
    at TOKEN_BYTES a token; beyond it the requests are aborted, what waits is dropped and the reader gets
    OverloadedError.
    """

    __slots__ = ("_backlog", "_client", "_closed", "_error", "_max_backlog", "_open", "_pending", "_waiter",
                 "on_overflow")  # fmt: skip

    def __init__(self, client: Owner, samples: dict[str, int], max_backlog_bytes: int) -> None:
        self._client = client
        self._open = samples  # request id -> samples not ended yet
        self._closed: set[tuple[str, int]] = set()  # ended samples of open requests
        self._pending: list[Output] = []
        self._backlog = 0
        self._max_backlog = max_backlog_bytes
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.on_overflow = _nothing

    def __aiter__(self) -> ReplicaStream:
        return self

    async def __anext__(self) -> list[Output]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._pending = self._pending, []
        self._backlog = 0
        return outputs

    def __enter__(self) -> ReplicaStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive; outputs may still wait to be read."""
        return not self._open

    def put(self, output: Output) -> None:
        """One output from the replica; called by the client."""
        request_id = output.request_id
        if self._closed and (request_id, output.sample_index) in self._closed:
            return
        self._pending.append(output)
        if output.finish_reason is not None:
            self._end_sample(request_id, output.sample_index)
        cost = TOKEN_BYTES * len(output.token_ids)
        if output.logprobs is not None:
            cost += LOGPROB_BYTES * sum([1 + len(entry.top) for entry in output.logprobs])
        self._backlog += cost
        if self._backlog > self._max_backlog:
            self._overflow()
        self._wake()

    def fail(self, error: HeadraceError) -> None:
        """Ends the stream with an error, after what already waits to be read."""
        if self._open:
            self._error = error
            self._abort_open()
            self._wake()

    def abort(self) -> None:
        """Stops everything that still runs; the stream ends. Harmless when it has ended."""
        if self._open:
            self._abort_open()
            self._wake()

    def abort_request(self, request_id: str) -> None:
        """Stops one of the requests."""
        if self._open.pop(request_id, None) is not None:
            self._client.send_abort(request_id)
            self._client.forget(request_id)
            self._wake()

    def abort_sample(self, request_id: str, sample_index: int) -> None:
        """Stops one sample, because a stop string was found in it; the others go on."""
        if request_id not in self._open or (request_id, sample_index) in self._closed:
            return
        if self._open[request_id] == 1:
            self.abort_request(request_id)
        else:
            self._client.send_abort(request_id, sample_index)
            self._end_sample(request_id, sample_index)

    def _end_sample(self, request_id: str, sample_index: int) -> None:
        left = self._open[request_id] - 1
        if left:
            self._open[request_id] = left
            self._closed.add((request_id, sample_index))
        else:
            del self._open[request_id]
            self._client.forget(request_id)

    def _abort_open(self) -> None:
        for request_id in self._open:
            self._client.send_abort(request_id)
            self._client.forget(request_id)
        self._open = {}

    def _overflow(self) -> None:
        self._error = OverloadedError(
            f"the reader fell more than {self._max_backlog} bytes behind and was cut off",
            hint="Read the stream faster, or raise --max-response-backlog-mb.",
            code="slow_reader",
        )
        self._pending = []
        self._backlog = 0
        self._abort_open()
        self.on_overflow()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


def _nothing() -> None:
    pass
