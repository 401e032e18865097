"""Cache events over ZeroMQ: order, repeats, gaps, replay, restarts, clearing; both ways of writing them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array

import msgspec
import pytest
import zmq
import zmq.asyncio

from headrace.core.identity import block_identities
from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared
from headrace.router.external.kv_blocks import BlockTranslator
from headrace.router.external.kv_events import EventLog, EventStream
from tests.router.external.stand_in import until

LOG = logging.getLogger("test")
ROOT = b"r" * 32
SIZE = 4


class Listener:
    """Keeps what it would know of the cache; a number out of order is a failure."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.next_seq = 0
        self.num_snapshots = 0

    def on_blocks(self, first_seq, events):
        assert first_seq == self.next_seq
        self.next_seq += len(events)
        for event in events:
            if isinstance(event, BlocksStored):
                self.held.update(event.block_ids)
            elif isinstance(event, BlocksRemoved):
                self.held.difference_update(event.block_ids)
            else:
                assert isinstance(event, CacheCleared)
                self.held.clear()

    def on_blocks_snapshot(self, snapshot):
        self.num_snapshots += 1
        self.next_seq = snapshot.next_seq
        self.held = {identity for event in snapshot.stored for identity in event.block_ids}


def tokens_of(number: int) -> list[int]:
    return [100 * number + place for place in range(SIZE)]


def ids(*numbers: int) -> set[bytes]:
    """Of one-block chains."""
    return {block_identities(ROOT, array("I", tokens_of(number)), SIZE)[0] for number in numbers}


def stored(number: int, **fields) -> dict:
    return {
        "type": "BlockStored", "block_hashes": [number], "parent_block_hash": None,
        "token_ids": tokens_of(number), "block_size": SIZE, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": [None],
        "group_idx": 0, **fields,
    }  # fmt: skip


def removed(number: int, **fields) -> dict:
    return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", "group_idx": 0, **fields}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events, ts: float) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), 0])


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def log(listener):
    log = EventLog(BlockTranslator(ROOT, SIZE), listener)
    log.begin()
    return log


def test_stored_removed_cleared(log, listener):
    assert log.take(0, batch(stored(1), stored(2), ts=1))
    assert listener.held == ids(1, 2)
    assert log.take(1, batch(removed(1), ts=2))
    assert listener.held == ids(2)
    assert log.take(2, batch(CLEARED, stored(3), ts=3))
    assert listener.held == ids(3)


def test_repeats_are_ignored(log, listener):
    first = batch(stored(1), ts=1)
    assert log.take(0, first) and log.take(1, batch(removed(1), ts=2))
    assert log.take(0, first)
    assert listener.held == set() and listener.num_snapshots == 1


def test_a_gap_is_noticed_and_healed_in_order(log, listener):
    assert log.take(0, batch(stored(1), ts=1))
    assert not log.take(2, batch(removed(2), ts=3))
    assert log.next_batch == 1
    assert log.take(1, batch(stored(2), ts=2)) and log.take(2, batch(removed(2), ts=3))
    assert listener.held == ids(1)


def test_what_is_lost_makes_all_void(log, listener):
    log.take(0, batch(stored(1), ts=1))
    log.skip_to(5)
    assert log.take(5, batch(stored(2), ts=9))
    assert listener.held == ids(2) and listener.num_snapshots == 2


def test_a_restarted_publisher_begins_anew(log, listener):
    log.take(0, batch(stored(1), ts=1))
    log.take(1, batch(stored(2), ts=2))
    assert log.take(0, batch(stored(3), ts=50))
    assert listener.held == ids(3)
    assert not log.take(2, batch(stored(4), ts=60)), "number 1 of the new life is missing"


def test_a_restart_whose_first_batches_were_missed(log, listener):
    log.take(0, batch(stored(1), ts=1))
    log.take(1, batch(stored(2), ts=2))
    log.take(2, batch(stored(5), ts=3))
    assert not log.take(1, batch(stored(3), ts=50))
    assert log.next_batch == 0 and listener.held == set()


def test_blocks_that_are_not_of_plain_tokens_on_the_device_are_left_out(log, listener):
    log.take(
        0,
        batch(
            stored(1, medium="CPU"), stored(2, lora_name="adapter"), stored(3, extra_keys=[["salt"]]),
            stored(4, group_idx=1), stored(5, medium=None), removed(5, medium="CPU"), ts=1,
        ),
    )  # fmt: skip
    assert listener.held == ids(5)


def test_events_written_as_arrays(log, listener):
    """As SGLang has them, and vLLM before 0.12."""
    rows = [
        ["BlockStored", [b"h1"], None, tokens_of(1), SIZE, None],
        ["BlockStored", [b"h2"], None, tokens_of(2), SIZE, None, "GPU"],
        ["BlockRemoved", [b"h1"]],
    ]
    assert log.take(0, msgspec.msgpack.encode([1.0, rows]))
    assert listener.held == ids(2)
    assert log.take(1, msgspec.msgpack.encode([2.0, [["AllBlocksCleared"]]]))
    assert listener.held == set()


class Publisher:
    """vLLM's: numbers batches, keeps the last ``kept`` for replay; ``lose`` drops one on the way."""

    def __init__(self, tmp_path, *, kept: int = 100) -> None:
        self.address = f"ipc://{tmp_path}/pub"
        self.replay_address = f"ipc://{tmp_path}/replay"
        self.kept = kept
        self.num_replays = 0
        self.topic = b""
        self._context = zmq.asyncio.Context()
        self.start()

    def start(self) -> None:
        self.buffer: list[tuple[int, bytes]] = []
        self.number = 0
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.bind(self.address)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.LINGER, 0)
        self._replay.bind(self.replay_address)
        self._task = asyncio.ensure_future(self._answer())

    async def subscribed(self) -> None:
        async with asyncio.timeout(10):
            assert (await self._pub.recv())[:1] == b"\x01"

    async def publish(self, *events, ts: float, lose: bool = False) -> None:
        payload = batch(*events, ts=ts)
        self.buffer = [*self.buffer, (self.number, payload)][-self.kept :]
        if not lose:
            await self._pub.send_multipart([self.topic, self.number.to_bytes(8, "big"), payload])
        self.number += 1

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.num_replays += 1
            for number, payload in self.buffer:
                if number >= int.from_bytes(start, "big"):
                    frames = [client, b"", self.topic, number.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(frames)
            await self._replay.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._pub.close()
        self._replay.close()

    async def close(self) -> None:
        await self.stop()
        self._context.term()


@pytest.fixture
async def publisher(tmp_path):
    publisher = Publisher(tmp_path)
    yield publisher
    await publisher.close()


@contextlib.asynccontextmanager
async def following(publisher, listener, *, replay: bool = True):
    log = EventLog(BlockTranslator(ROOT, SIZE), listener)
    stream = EventStream(log, publisher.address, publisher.replay_address if replay else "", log=LOG)
    task = asyncio.ensure_future(stream.run())
    await publisher.subscribed()
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_what_was_published_before_is_replayed(publisher, listener):
    await publisher.publish(stored(1), ts=1)
    async with following(publisher, listener):
        await until(lambda: listener.held == ids(1))
        await publisher.publish(stored(2), ts=2)
        await until(lambda: listener.held == ids(1, 2))


async def test_a_lost_message_is_replayed(publisher, listener):
    async with following(publisher, listener):
        await publisher.publish(stored(1), ts=1)
        await until(lambda: listener.held == ids(1))
        await publisher.publish(removed(1), ts=2, lose=True)
        await publisher.publish(stored(3), ts=3)
        await until(lambda: listener.held == ids(3))
        assert listener.num_snapshots == 1, "healed, not begun anew"


@pytest.mark.parametrize("replay", [True, False])
async def test_a_message_lost_for_good_begins_anew(tmp_path, listener, replay):
    publisher = Publisher(tmp_path, kept=1)
    async with following(publisher, listener, replay=replay):
        await publisher.publish(stored(1), ts=1)
        await until(lambda: listener.held == ids(1))
        await publisher.publish(removed(1), ts=2, lose=True)
        await publisher.publish(stored(3), ts=3)
        await until(lambda: listener.held == ids(3))
        assert listener.num_snapshots == 2
    await publisher.close()


async def test_a_publisher_that_restarts_is_followed(publisher, listener):
    async with following(publisher, listener):
        await publisher.publish(stored(1), ts=1)
        await publisher.publish(stored(2), ts=2)
        await until(lambda: listener.held == ids(1, 2))
        await publisher.stop()
        publisher.start()
        await publisher.subscribed()
        await publisher.publish(stored(3), ts=60)
        await until(lambda: listener.held == ids(3))


async def test_garbage_is_skipped_and_what_was_known_is_void(publisher, listener):
    async with following(publisher, listener):
        await publisher.publish(stored(1), ts=1)
        await until(lambda: listener.held == ids(1))
        await publisher._pub.send_multipart([b"", b"short", b"x"])
        await publisher._pub.send_multipart([b"", (1).to_bytes(8, "big"), b"\xc1"])
        publisher.number = 2
        await publisher.publish(stored(2), ts=3)
        await until(lambda: listener.held == ids(2))
