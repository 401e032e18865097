"""The supervisor's own connection to a replica, on which it asks about packs, one question at a time."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from headrace.core.errors import EngineError, UnavailableError
from headrace.core.messages import (
    AskRecorded,
    AskStepTimes,
    FromReplica,
    Hello,
    PackFailed,
    PackReady,
    PackRetired,
    PackUsed,
    PreparePack,
    Recorded,
    RetirePack,
    Score,
    Scored,
    Scores,
    StepTimes,
    ToReplica,
    UsePack,
)
from headrace.core.wire import FrameDecoder, FrameError, encode_frame, gateway_decoder

CONNECT_S = 10.0
ANSWER_S = 60.0
# A compiler at the lowest priority on a busy machine; a pass of a large model for every token.
PREPARE_S = 900.0
SCORE_S = 900.0
_READ_BYTES = 1 << 18

Reply = TypeVar("Reply", bound=FromReplica)


class ReplicaLink:
    """Open between ``connect`` and ``close``. Every question raises UnavailableError when the replica goes
    away or does not answer, and what the replica says instead of an answer."""

    def __init__(self, replica_id: str, path: str) -> None:
        self.replica_id = replica_id
        self._path = path
        self._decoder: FrameDecoder[FromReplica] = gateway_decoder()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self.hello: Hello

    async def connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                self._reader, self._writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:  # a TimeoutError is one
            raise UnavailableError(f"{self.replica_id} cannot be reached: {error}") from error
        self.hello = await self._receive(Hello, CONNECT_S)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def prepare(self, pack_id: str, folder: str) -> PackReady:
        return await self._ask(PreparePack(pack_id, folder), PackReady, PREPARE_S)

    async def use(self, pack_id: str) -> None:
        await self._ask(UsePack(pack_id), PackUsed)

    async def retire(self, pack_id: str) -> None:
        await self._ask(RetirePack(pack_id), PackRetired)

    async def step_times(self) -> StepTimes:
        return await self._ask(AskStepTimes(), StepTimes)

    async def recorded(self) -> list[bytes]:
        return (await self._ask(AskRecorded(), Recorded)).sequences

    async def score(self, score: Score) -> list[Scored]:
        return (await self._ask(score, Scores, SCORE_S)).scored

    async def _ask(self, message: ToReplica, wanted: type[Reply], timeout_s: float = ANSWER_S) -> Reply:
        assert self._writer is not None, "not connected"
        self._writer.write(encode_frame(message))
        return await self._receive(wanted, timeout_s)

    async def _receive(self, wanted: type[Reply], timeout_s: float) -> Reply:
        messages: list[FromReplica] = []
        try:
            async with asyncio.timeout(timeout_s):
                while not messages:
                    data = await self._reader.read(_READ_BYTES)
                    if not data:
                        raise UnavailableError(f"{self.replica_id} went away")
                    messages = self._decoder.feed(data)
        except TimeoutError:
            raise UnavailableError(f"{self.replica_id} did not answer within {timeout_s:.0f} s") from None
        except (OSError, FrameError) as error:
            raise UnavailableError(f"{self.replica_id} went away: {error}") from error
        (message,) = messages
        if isinstance(message, PackFailed):
            raise message.failed.to_error()
        if not isinstance(message, wanted):
            raise EngineError(f"{self.replica_id} answered with {type(message).__name__}")
        return message
