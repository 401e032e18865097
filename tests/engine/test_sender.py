"""Blocks sent beside the step loop: in order, as far as there is room, and never after a withdrawal."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from headrace.engine.sender import Outgoing, Sender
from tests.engine.sources import ListStream

WAIT_S = 20.0


class Reader:
    """Reads at once, unless it is told to wait at the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_reading = threading.Event()

    def __call__(self, blocks: Sequence[int]) -> list[bytearray]:
        self.is_reading.set()
        assert self.gate.wait(WAIT_S)
        return [bytearray([block]) for block in blocks]


class Rig:
    def __init__(self) -> None:
        self.read = Reader()
        self.woken = threading.Event()
        self.sender = Sender(read=self.read, wake=self.woken.set, threaded=True)

    def outgoing(self, room: int, first: int = 0) -> tuple[Outgoing, ListStream]:
        stream = ListStream(room)
        return Outgoing(stream, first, 0.0), stream


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.read.gate.set()
    made.sender.close()


def test_blocks_are_sent_in_order_and_the_engine_is_woken_after_the_last(rig: Rig) -> None:
    outgoing, stream = rig.outgoing(room=9, first=2)
    rig.sender.offer(outgoing, [(b"c", 30), (b"d", 40)])
    assert rig.woken.wait(WAIT_S)
    assert stream.blocks == [(2, b"c", bytes([30])), (3, b"d", bytes([40]))]
    assert outgoing.num_sent == 4 and not outgoing.ready and rig.sender.num_sent_blocks == 2


def test_a_stream_without_room_holds_up_no_other_and_goes_on_when_told(rig: Rig) -> None:
    full, full_stream = rig.outgoing(room=0)
    free, free_stream = rig.outgoing(room=5)
    rig.sender.offer(full, [(b"a", 1)])
    rig.sender.offer(free, [(b"b", 2)])
    assert rig.woken.wait(WAIT_S) and len(free_stream.blocks) == 1 and not full_stream.blocks
    rig.woken.clear()
    full_stream.num_free = 1
    rig.sender.notice()
    assert rig.woken.wait(WAIT_S) and len(full_stream.blocks) == 1


def test_a_withdrawal_waits_for_the_block_that_is_being_read(rig: Rig) -> None:
    outgoing, stream = rig.outgoing(room=9)
    rig.read.gate.clear()
    rig.sender.offer(outgoing, [(b"a", 1), (b"b", 2)])
    assert rig.read.is_reading.wait(WAIT_S)
    withdrawal = threading.Thread(target=rig.sender.withdraw, args=[outgoing])
    withdrawal.start()
    withdrawal.join(0.05)
    assert withdrawal.is_alive(), "the block could be freed while it is read"
    rig.read.gate.set()
    withdrawal.join(WAIT_S)
    assert not withdrawal.is_alive() and not outgoing.ready
    assert [index for index, _, _ in stream.blocks] == list(range(outgoing.num_sent))
    sent = len(stream.blocks)
    rig.sender.notice()
    rig.sender.pump()
    assert len(stream.blocks) == sent, "something was sent after it was withdrawn"


def test_a_closed_sender_sends_nothing(rig: Rig) -> None:
    outgoing, stream = rig.outgoing(room=0)
    rig.sender.offer(outgoing, [(b"a", 1)])
    rig.sender.close()
    stream.num_free = 5
    rig.sender.notice()
    rig.sender.pump()
    assert not stream.blocks
