"""A prefill replica and a decode replica in processes of their own: what one computes, the other takes.

Contract: exact (float32).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.core.messages import Moves, Output, Stats
from tests.models.tiny import make_tiny
from tests.replica.harness import PATIENCE_S, Peer, Replica

LENGTH = 12
# Many small steps and blocks, so that blocks are on their way while others are computed.
PREFILL = {"role": "prefill", "max_num_batched_tokens": 16}
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prefill(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    running = Replica(folder, tmp_path_factory.mktemp("prefill"), kv_listen="unix", **PREFILL).wait_ready()
    yield running
    assert running.process.poll() is None, "the replica died during the tests"
    running.stop()


@pytest.fixture(scope="module")
def decode(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    running = Replica(folder, tmp_path_factory.mktemp("decode"), role="decode").wait_ready()
    yield running
    assert running.process.poll() is None, "the replica died during the tests"
    running.stop()


@pytest.fixture(scope="module")
def far(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Another prefill replica, over TCP; the last test that uses it drains it."""
    directory = tmp_path_factory.mktemp("far")
    running = Replica(folder, directory, kv_listen="tcp://127.0.0.1:0", **PREFILL).wait_ready()
    yield running
    running.stop()


@pytest.fixture
def alone(prefill: Replica) -> Iterator[Peer]:
    """Whoever asks here gets the tokens of a replica that computes everything itself: it can do that too."""
    connected = prefill.connect()
    yield connected
    connected.close()


@pytest.fixture
def peers(prefill: Replica, decode: Replica) -> Iterator[tuple[Peer, Peer]]:
    """Connections to both sides; afterwards neither holds a block."""
    sides = prefill.connect(), decode.connect()
    yield sides
    for side in sides:
        side.wait_idle()
        side.close()


def prompt(number: int, length: int = 200) -> list[int]:
    """Prompts that share nothing."""
    return [2 + (7 * i + 31 * number + i * i * number) % 300 for i in range(length)]


def moves(stats: Stats) -> Moves:
    return stats.moves or Moves()


def right(alone: Peer, tokens: list[int], **params: object) -> list[int]:
    alone.submit("right", tokens, max_tokens=LENGTH, **params)
    return alone.finish("right")["right"]


def first_of(outputs: list[Output]) -> Output:
    return next(output for output in outputs if output.timing is not None)


def num_descriptors(replica: Replica) -> int:
    return len(os.listdir(f"/proc/{replica.process.pid}/fd"))


def finish(peer: Peer, name: str) -> list[Output]:
    """All outputs of a request of one sample, which ends well."""
    outputs, failed = peer.until(
        lambda outputs, failed: (
            bool(failed) or any(o.request_id == name and o.finish_reason is not None for o in outputs)
        )
    )
    assert failed == []
    return [output for output in outputs if output.request_id == name]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_hello_says_who_gives_blocks_and_what_they_are(peers: tuple[Peer, Peer]) -> None:
    giver, taker = (peer.hello for peer in peers)
    assert (giver.role, taker.role) == ("prefill", "decode")
    assert giver.kv_address.startswith("unix:/") and taker.kv_address == ""
    assert giver.kv_format == taker.kv_format and "float32" in giver.kv_format
    assert giver.kv_block_bytes == taker.kv_block_bytes > 0
    assert giver.root_identity == taker.root_identity


def test_a_prompt_is_computed_there_and_read_here(peers: tuple[Peer, Peer], alone: Peer) -> None:
    giver, taker = peers
    before = giver.probe().stats, taker.probe().stats
    taker.submit("split", prompt(1), prefill_from=giver.hello.kv_address, max_tokens=LENGTH)
    outputs = finish(taker, "split")
    timing = first_of(outputs).timing
    assert timing is not None
    # the last token is always computed here, and with it the rest of its block
    assert timing.num_fetched_tokens == 196 and timing.num_computed_tokens == 4 and timing.fill_s > 0
    after = giver.wait_idle().stats, taker.wait_idle().stats
    assert moves(after[0]).sent_blocks - moves(before[0]).sent_blocks == 49
    assert moves(after[1]).fetched_blocks - moves(before[1]).fetched_blocks == 49
    assert moves(after[1]).fetched_bytes == moves(after[1]).fetched_blocks * taker.hello.kv_block_bytes
    assert after[0].computed_prompt_tokens - before[0].computed_prompt_tokens == 196
    assert after[1].computed_prompt_tokens - before[1].computed_prompt_tokens == 4
    assert after[0].generation_tokens == before[0].generation_tokens, "nothing was sampled there"
    assert tokens_of(outputs) == right(alone, prompt(1))


def test_what_it_holds_already_is_not_fetched_again(peers: tuple[Peer, Peer], alone: Peer) -> None:
    giver, taker = peers
    address = giver.hello.kv_address
    taker.submit("short", prompt(2, 100), prefill_from=address, max_tokens=LENGTH)
    finish(taker, "short")
    before = moves(taker.probe().stats).fetched_blocks
    taker.submit("long", prompt(2, 180), prefill_from=address, max_tokens=LENGTH)
    outputs = finish(taker, "long")
    assert tokens_of(outputs) == right(alone, prompt(2, 180))
    assert moves(taker.probe().stats).fetched_blocks - before == 44 - 25
    taker.submit("again", prompt(2, 180), prefill_from=address, max_tokens=LENGTH)
    again = finish(taker, "again")
    assert tokens_of(again) == tokens_of(outputs) and first_of(again).num_cached_tokens == 176
    assert moves(taker.probe().stats).fetched_blocks - before == 44 - 25


def test_all_kinds_of_requests_get_the_tokens_of_one_replica(peers: tuple[Peer, Peer], alone: Peer) -> None:
    giver, taker = peers
    kinds: list[dict[str, object]] = [
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.8, "seed": 8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logprobs": 3},
        {},
    ]
    for i, kind in enumerate(kinds):
        taker.submit(
            f"kind-{i}",
            prompt(10 + i, 150 + i),
            prefill_from=giver.hello.kv_address,
            max_tokens=LENGTH,
            **kind,
        )
    got = taker.finish(*(f"kind-{i}" for i in range(len(kinds))))
    wanted = [right(alone, prompt(10 + i, 150 + i), **kind) for i, kind in enumerate(kinds)]
    assert list(got.values()) == wanted


def test_one_who_leaves_while_blocks_come_leaves_nothing(
    peers: tuple[Peer, Peer], prefill: Replica, decode: Replica
) -> None:
    giver, taker = peers
    for i in range(6):
        taker.submit(f"gone-{i}", prompt(20 + i, 400), prefill_from=giver.hello.kv_address, max_tokens=LENGTH)
        taker.abort(f"gone-{i}")
    lost = decode.connect()
    for i in range(3):
        lost.submit(f"lost-{i}", prompt(30 + i, 400), prefill_from=giver.hello.kv_address, max_tokens=LENGTH)
    lost.close()
    assert moves(taker.wait_idle().stats).num_filling == 0
    giver.wait_idle()


def test_a_sender_that_is_killed_costs_no_token(
    folder: Path, tmp_path: Path, peers: tuple[Peer, Peer], alone: Peer
) -> None:
    _, taker = peers
    sender = Replica(folder, tmp_path, kv_listen="unix", **PREFILL).wait_ready()
    check_without(sender, taker, alone, 40, sender.process.kill)
    sender.stop()


def test_a_receiver_that_is_killed_leaves_nothing_behind(
    folder: Path, tmp_path: Path, prefill: Replica, peers: tuple[Peer, Peer]
) -> None:
    giver, _ = peers
    before = num_descriptors(prefill)
    receiver = Replica(folder, tmp_path, role="decode").wait_ready()
    own = receiver.connect()
    for i in range(8):
        own.submit(f"gone-{i}", prompt(60 + i, 480), prefill_from=giver.hello.kv_address, max_tokens=LENGTH)
    while not giver.probe().stats.num_running:
        pass
    receiver.process.kill()
    receiver.stop()
    stats = giver.wait_idle().stats
    deadline = time.monotonic() + PATIENCE_S
    while num_descriptors(prefill) != before:
        assert time.monotonic() < deadline, "a descriptor is left"
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("address", ["unix:/nowhere/kv.sock", "tcp://127.0.0.1:1", "nonsense"])
def test_an_address_where_nobody_is_costs_no_token(
    address: str, peers: tuple[Peer, Peer], alone: Peer
) -> None:
    _, taker = peers
    tokens = prompt(70 + len(address))
    taker.submit("split", tokens, prefill_from=address, max_tokens=LENGTH)
    assert taker.finish("split")["split"] == right(alone, tokens)


def test_over_tcp(far: Replica, peers: tuple[Peer, Peer], alone: Peer) -> None:
    _, taker = peers
    address = far.connect().hello.kv_address
    assert address.startswith("tcp://127.0.0.1:") and not address.endswith(":0")
    taker.submit("split", prompt(80), prefill_from=address, max_tokens=LENGTH)
    outputs = finish(taker, "split")
    timing = first_of(outputs).timing
    assert timing is not None and timing.num_fetched_tokens == 196
    assert tokens_of(outputs) == right(alone, prompt(80))


def test_a_sender_that_hangs_costs_no_token(far: Replica, peers: tuple[Peer, Peer], alone: Peer) -> None:
    check_without(far, peers[1], alone, 90, lambda: far.process.send_signal(signal.SIGSTOP))
    far.process.send_signal(signal.SIGCONT)
    observer = far.connect()
    observer.wait_idle()
    observer.close()


def check_without(
    sender: Replica, taker: Peer, alone: Peer, number: int, trouble: Callable[[], object]
) -> None:
    """Requests that count on the sender end well although trouble comes while their blocks do."""
    address = sender.connect().hello.kv_address
    failed = moves(taker.probe().stats).failed_fetches
    for i in range(4):
        taker.submit(f"split-{i}", prompt(number + i, 300), prefill_from=address, max_tokens=LENGTH)
    trouble()
    taker.submit("late", prompt(number + 4, 310), prefill_from=address, max_tokens=LENGTH)
    got = taker.finish(*(f"split-{i}" for i in range(4)), "late")
    assert [got[f"split-{i}"] for i in range(4)] == [right(alone, prompt(number + i, 300)) for i in range(4)]
    assert got["late"] == right(alone, prompt(number + 4, 310))
    assert moves(taker.probe().stats).failed_fetches > failed


def test_a_draining_sender_finishes_what_it_began_and_starts_nothing(
    far: Replica, peers: tuple[Peer, Peer], alone: Peer
) -> None:
    _, taker = peers
    own = far.connect()
    address = own.hello.kv_address
    before, computed = moves(taker.probe().stats), own.probe().stats.computed_prompt_tokens
    own.submit("long", [5, 6, 7], max_tokens=400)  # keeps it until it has been seen to drain
    taker.submit("early", prompt(50, 400), prefill_from=address, max_tokens=LENGTH)
    while own.probe().stats.computed_prompt_tokens <= computed + 3:
        pass
    far.process.terminate()
    while not own.probe().draining:
        pass
    taker.submit("late", prompt(51, 300), prefill_from=address, max_tokens=LENGTH)
    got = taker.finish("early", "late")
    assert got == {"early": right(alone, prompt(50, 400)), "late": right(alone, prompt(51, 300))}
    after = moves(taker.probe().stats)
    assert after.failed_fetches - before.failed_fetches == 1
    assert after.fetched_blocks - before.fetched_blocks == 99
    assert far.process.wait(PATIENCE_S) == 0
    assert list(far.socket.parent.iterdir()) == [], "no socket is left"
