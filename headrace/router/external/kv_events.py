"""vLLM's cache events over ZeroMQ; SGLang publishes the same.

    PUB    [topic, sequence number (8 bytes, big-endian), msgpack EventBatch]
    ROUTER the numbers kept by its replay buffer, from the one asked for, then number -1

A number that is missing is asked for again. When nobody has it any more, what was known is void: everything
is cleared, and what the buffer still holds is taken from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from headrace.core.messages import CacheCleared, CacheEvent, CacheSnapshot
from headrace.router.external.kv_blocks import BlockTranslator

REPLAY_TIMEOUT_S = 5.0
RECEIVE_HIGH_WATER = 100_000
_END = b"\xff" * 8
_DEVICE = (None, "GPU")  # what vLLM calls the device's own memory, on a CPU as well


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


# Earlier versions, and SGLang, write events as arrays.
class _StoredRow(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _RemovedRow(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None = None


class _ClearedRow(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _RowBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(EventBatch)
_row_decoder = msgspec.msgpack.Decoder(_RowBatch)


class BlockListener(Protocol):
    """What follows a server's cache."""

    def on_blocks(self, first_seq: int, events: list[CacheEvent]) -> None:
        """Numbered without gaps behind the latest snapshot's ``next_seq``."""

    def on_blocks_snapshot(self, snapshot: CacheSnapshot) -> None:
        """What was known before is void."""


class EventLog:
    """The state machine behind the sockets: batches in any order in, our events in order out."""

    def __init__(self, translator: BlockTranslator, listener: BlockListener) -> None:
        self.next_batch = 0
        self._translator = translator
        self._listener = listener
        self._next_seq = 0
        self._last_ts = 0.0

    def begin(self) -> None:
        """Nothing is known: of a server first seen, or started anew."""
        self._translator.clear()
        self._listener.on_blocks_snapshot(CacheSnapshot([], self._next_seq))

    def take(self, number: int, payload: bytes) -> bool:
        """One batch; False when batches before it are missing: fetch those from ``next_batch`` first.

        Repeated batches are ignored. A low number with a new time is a publisher that was started anew.
        """
        if number > self.next_batch:
            return False
        batch = _decode(payload)
        if number < self.next_batch:
            if batch.ts <= self._last_ts:
                return True
            self.begin()
            if number:
                self.next_batch = 0
                return False
        self.next_batch = number + 1
        self._last_ts = batch.ts
        self._apply(batch.events)
        return True

    def skip_to(self, number: int) -> None:
        """The batches before ``number`` are lost: what was known may be wrong."""
        self.begin()
        self.next_batch = number

    def _apply(self, events: list[Event]) -> None:
        ours: list[CacheEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._translator.clear()
                ours.append(CacheCleared())
            elif event.medium not in _DEVICE or event.group_idx:
                continue  # offloaded copies, and further groups of a hybrid model
            elif isinstance(event, BlockRemoved):
                ours += self._translator.removed(event.block_hashes)
            elif not _is_plain(event):
                continue  # keys and values that depend on more than tokens
            else:
                ours += self._translator.stored(
                    event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size
                )
        if ours:
            first, self._next_seq = self._next_seq, self._next_seq + len(ours)
            self._listener.on_blocks(first, ours)


class EventStream:
    """Follows one publisher, over as many restarts as it has, from ``run`` until it is cancelled."""

    def __init__(
        self, events: EventLog, address: str, replay: str, *, topic: str = "", log: logging.Logger
    ) -> None:
        self._events = events
        self._address = address
        self._replay = replay
        self._topic = topic.encode()
        self._log = log

    async def run(self, on_subscribed: Callable[[], None] | None = None) -> None:
        """Subscribes, takes what the replay buffer holds, then follows; ends only by cancellation."""
        context = zmq.asyncio.Context()
        socket: zmq.asyncio.Socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            socket.connect(self._address)
            self._events.begin()
            if self._replay:
                await self._catch_up(context)
            if on_subscribed is not None:
                on_subscribed()
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    self._log.warning("%s: a message that is no event", self._address)
                    continue
                await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.close()
            context.term()

    async def _take(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        events = self._events
        try:
            if events.take(number, payload):
                return
            self._log.info(
                "%s: cache events from %d to %d are missing", self._address, events.next_batch, number
            )
            if self._replay:
                await self._catch_up(context)
            if not events.take(number, payload):
                self._log.warning("%s: they are lost; its index begins anew", self._address)
                events.skip_to(number)
                events.take(number, payload)
        except msgspec.DecodeError as error:
            self._log.warning("%s: an undecodable cache event: %s", self._address, error)
            events.skip_to(number + 1)

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Asks for what is missing and takes what is there of it."""
        events = self._events
        socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            await socket.send_multipart([b"", events.next_batch.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == _END:
                    return
                number = int.from_bytes(frames[-2], "big")
                if not events.take(number, frames[-1]):
                    events.skip_to(number)
                    events.take(number, frames[-1])
        except TimeoutError:
            self._log.warning("%s does not answer a request for cache events", self._replay)
        finally:
            socket.close()


def _decode(payload: bytes) -> EventBatch:
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError:
        batch = _row_decoder.decode(payload)
        return EventBatch(batch.ts, [_of_row(event) for event in batch.events], batch.data_parallel_rank)


def _of_row(event: _StoredRow | _RemovedRow | _ClearedRow) -> Event:
    if isinstance(event, _ClearedRow):
        return AllBlocksCleared()
    if isinstance(event, _RemovedRow):
        return BlockRemoved(event.block_hashes, event.medium)
    return BlockStored(
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        event.lora_id,
        event.medium,
    )


def _is_plain(event: BlockStored) -> bool:
    adapter = event.lora_id is not None or event.lora_name is not None
    return not adapter and not any(event.extra_keys or ())
