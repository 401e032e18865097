"""What a subscriber learns of a replica's cache: as it happens, again, and all at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.identity import block_identities
from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, CacheSnapshot, Step
from headrace.core.request import pack_tokens
from headrace.replica.event_log import EventLog
from tests.models.tiny import make_tiny
from tests.replica.harness import Peer, Replica


class Index:
    """The identities that a cache holds, by hearsay."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.next_seq = 0

    def take(self, message: Step | CacheSnapshot) -> None:
        if isinstance(message, CacheSnapshot):
            self.known = {block_id for stored in message.stored for block_id in stored.block_ids}
            self.next_seq = message.next_seq
            return
        assert message.event_seq == self.next_seq, "a gap"
        self.next_seq += len(message.events)
        for event in message.events:
            if isinstance(event, BlocksStored):
                assert self.known.isdisjoint(event.block_ids), "stored twice"
                self.known.update(event.block_ids)
            elif isinstance(event, BlocksRemoved):
                assert self.known.issuperset(event.block_ids)
                self.known.difference_update(event.block_ids)
            else:
                self.known.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def replica(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    running = Replica(folder, tmp_path_factory.mktemp("replica"), max_model_len=120, kv_cache_gib=0.0004)
    yield running.wait_ready()
    running.stop()


def work(peer: Peer, name: str, prompt: list[int]) -> list[Step]:
    """One request to its end; the steps that the peer saw meanwhile."""
    steps = []
    peer.submit(name, prompt, max_tokens=5)
    while not (steps and steps[-1].outputs and steps[-1].outputs[-1].finish_reason):
        steps.append(peer.step())
    return steps


def prompt(number: int) -> list[int]:
    return [2 + number % 300, 2 + number // 300, *range(5, 95)]


def first_step(peer: Peer) -> tuple[CacheSnapshot | None, Step]:
    """What a subscription is answered with."""
    message = peer.receive()
    if isinstance(message, CacheSnapshot):
        return message, peer.step()
    assert isinstance(message, Step)
    return None, message


def test_a_subscriber_follows_what_happens_and_others_do_not(replica: Replica) -> None:
    worker, watcher = replica.connect(), replica.connect()
    watcher.subscribe()
    snapshot, step = first_step(watcher)
    assert snapshot is not None and step.events == [] and step.stats.num_blocks > 0
    index = Index()
    index.take(snapshot)
    index.take(step)
    removed = False
    for number in range(12):  # the cache holds fewer
        mine = work(worker, f"w{number}", prompt(number))
        assert not any(step.events for step in mine)
        for _ in mine:
            step = watcher.step()
            assert step.outputs == []
            removed = removed or any(isinstance(event, BlocksRemoved) for event in step.events)
            index.take(step)
    assert removed
    late = replica.connect()
    late.subscribe()
    snapshot, step = first_step(late)
    assert snapshot is not None and snapshot.next_seq == index.next_seq
    other = Index()
    other.take(snapshot)
    assert other.known == index.known
    chain = block_identities(worker.hello.root_identity, pack_tokens(prompt(11)), 4)
    assert index.known.issuperset(chain)
    told: set[bytes] = {worker.hello.root_identity}
    for stored in snapshot.stored:  # parents first, unless the parent is gone
        assert stored.parent in told or stored.parent not in other.known
        told.update(stored.block_ids)
    for peer in (worker, watcher, late):
        peer.close()


def test_a_gap_is_healed_by_a_replay(replica: Replica) -> None:
    peer = replica.connect()
    peer.subscribe()
    snapshot, _ = first_step(peer)
    assert snapshot is not None
    steps = work(peer, "g", prompt(500))
    peer.subscribe(snapshot.next_seq, peer.hello.instance)
    again, step = first_step(peer)
    assert again is None and step.event_seq == snapshot.next_seq
    assert step.events == [event for one in steps for event in one.events] != []
    # also on another connection, as after a lost one, and in the middle
    peer.close()
    other = replica.connect()
    assert other.hello.instance == peer.hello.instance
    other.subscribe(snapshot.next_seq + 1, other.hello.instance)
    again, later = first_step(other)
    assert again is None and later.events == step.events[1:]
    other.close()


@pytest.mark.parametrize("case", ["another process", "the future", "before time"])
def test_what_cannot_be_replayed_is_told_whole(case: str, replica: Replica) -> None:
    peer = replica.connect()
    instance = "0123456789abcdef" if case == "another process" else peer.hello.instance
    peer.subscribe({"another process": 0, "the future": 10**9, "before time": -5}[case], instance)
    snapshot, step = first_step(peer)
    assert snapshot is not None and step.event_seq == snapshot.next_seq and step.events == []
    peer.close()


def test_an_abort_is_told_to_subscribers_also_when_nothing_else_happens(replica: Replica) -> None:
    watcher, worker = replica.connect(), replica.connect()
    watcher.subscribe()
    first_step(watcher)
    worker.submit("gone", [5, 6, 7], max_tokens=100)
    worker.step()
    worker.close()
    while watcher.step().stats.num_running:
        pass
    watcher.close()


def test_two_processes_of_one_replica_are_told_apart(folder: Path, tmp_path: Path, replica: Replica) -> None:
    known = replica.connect()
    other = Replica(folder, tmp_path).wait_ready()
    try:
        assert other.connect().hello.instance != known.hello.instance
    finally:
        other.stop()
        known.close()


def stored(*names: int) -> BlocksStored:
    return BlocksStored([name.to_bytes(32, "big") for name in names], b"")


def test_the_log_keeps_the_latest_within_its_bounds() -> None:
    log = EventLog(max_events=3, max_ids=5)
    events: list[CacheEvent] = [stored(1), BlocksRemoved([b"1" * 32]), stored(2), stored(3)]
    log.append(0, events)
    assert log.next_seq == 4
    assert log.since(0) is None and log.since(1) == events[1:] and log.since(4) == []
    assert log.since(5) is None and log.since(-1) is None
    large = stored(*range(10, 14))
    log.append(4, [CacheCleared(), large])
    assert log.since(4) == [CacheCleared(), large] and log.since(3) == [stored(3), CacheCleared(), large]
    log.append(6, [stored(*range(20, 30))])
    assert log.since(6) is None and log.since(7) == [], "one event beyond the bound is not kept"
