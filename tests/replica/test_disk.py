"""A replica with a disk tier: what it tells of it, and what the next process finds.

Contract: exact (float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.core.messages import BlocksStored, CacheSnapshot, Step
from tests.models.tiny import make_tiny
from tests.replica.harness import PATIENCE_S, Peer, Replica

PROMPT = [2 + (5 * i + i * i) % 300 for i in range(121)]
NUM_BLOCKS = 30  # of the prompt; the first tokens of the answer fill one more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


def disk_blocks(events: list[object]) -> set[bytes]:
    """Stored on disk, among these events."""
    stored = [event for event in events if isinstance(event, BlocksStored) and event.tier == "disk"]
    return {block_id for event in stored for block_id in event.block_ids}


def until_on_disk(peer: Peer, count: int) -> set[bytes]:
    """What the replica tells of by itself, while nobody asks anything of it."""
    found: set[bytes] = set()
    while len(found) < count:
        message = peer.receive()
        if isinstance(message, CacheSnapshot):
            found |= disk_blocks(list(message.stored))
        elif isinstance(message, Step):
            found |= disk_blocks(list(message.events))
        assert message is not None
    return found


@pytest.fixture
def started(folder: Path, tmp_path: Path) -> Iterator[Callable[[str], Replica]]:
    """Starts one more process on the same disk."""
    knobs = {"kv_disk_gb": 0.1, "kv_disk_path": str(tmp_path / "kv")}
    replicas: list[Replica] = []

    def start(name: str) -> Replica:
        replicas.append(Replica(folder, tmp_path / name, **knobs))
        return replicas[-1].wait_ready()

    yield start
    for replica in replicas:
        replica.stop()


def test_what_one_process_wrote_the_next_one_reads(started: Callable[[str], Replica], tmp_path: Path) -> None:
    first = started("first")
    peer = first.connect()
    peer.subscribe()
    assert str(tmp_path / "kv") in peer.hello.kv_disk
    peer.submit("written", PROMPT, max_tokens=4)
    wanted = peer.finish("written")["written"]
    # an idle replica writes what it holds, and says so although nothing else happens
    told = until_on_disk(peer, NUM_BLOCKS + 1)
    stats = peer.wait_idle().stats
    assert stats.moves is not None and stats.moves.disk_blocks == len(told)
    # what is computed right before the end is written as well
    peer.submit("late", PROMPT[::-1], max_tokens=4)
    late = peer.finish("late")["late"]
    first.process.terminate()
    assert first.process.wait(PATIENCE_S) == 0
    files = [path for path in (tmp_path / "kv").rglob("*") if len(path.name) == 64]
    assert len(files) == 2 * (NUM_BLOCKS + 1) and list((tmp_path / "kv" / "tmp").iterdir()) == []

    second = started("second")
    peer = second.connect()
    peer.subscribe()
    assert until_on_disk(peer, 2 * (NUM_BLOCKS + 1)) >= told, "found without being asked for"
    for name, prompt, right in (("written", PROMPT, wanted), ("late", PROMPT[::-1], late)):
        peer.submit(name, prompt, max_tokens=4)
        outputs, failed = peer.until(
            lambda outputs, failed: bool(failed) or any(o.finish_reason is not None for o in outputs)
        )
        assert failed == [] and [token for o in outputs for token in o.token_ids] == right
        timing = outputs[0].timing
        assert timing is not None and timing.num_disk_tokens == 4 * NUM_BLOCKS
        assert timing.num_computed_tokens == 1 and timing.fill_s > 0
        assert outputs[0].num_cached_tokens == 4 * NUM_BLOCKS, "a caller pays for it as for what memory had"
    moves = peer.wait_idle().stats.moves
    assert moves is not None and moves.disk_hit_blocks == 2 * NUM_BLOCKS and moves.damaged_blocks == 0
