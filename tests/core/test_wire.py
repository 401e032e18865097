"""Frames survive any split of the byte stream, and nonsense closes a connection, not a process."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages import Abort, Drain, Output, Probe, Stats, Step, Submit
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.core.wire import (
    MAX_FRAME_BYTES,
    FrameError,
    encode_frame,
    gateway_decoder,
    replica_decoder,
)

request = Request(
    request_id="r1",
    prompt=pack_tokens([1, 2, 70000]),
    sampling=SamplingParams(seed=7, stop=["x"], logit_bias={5: -1.5}),
)
MESSAGES = [Submit(request), Abort("r1"), Abort("r2", 3), Drain(), Probe(2**40)]


@given(st.lists(st.integers(1, 60), max_size=30))
def test_messages_survive_any_split(cuts: list[int]) -> None:
    stream = b"".join(map(encode_frame, MESSAGES))
    decoder = replica_decoder()
    received = []
    offset = 0
    for cut in cuts:
        received += decoder.feed(stream[offset : offset + cut])
        offset += cut
    received += decoder.feed(stream[offset:])
    assert received == MESSAGES
    assert list(received[0].request.token_ids()) == [1, 2, 70000]


def test_a_step_round_trips() -> None:
    step = Step(
        [Output("r", 0, [5, 6], "stop", 6, 32)], [], Stats(num_running=1, num_blocks=4, num_free_blocks=1)
    )
    (received,) = gateway_decoder().feed(encode_frame(step))
    assert received == step
    assert received.stats.kv_cache_usage == 0.75


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + msgspec.msgpack.encode(5),
        struct.pack("<I", 0),
    ],
)
def test_garbage_is_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        replica_decoder().feed(data)


def test_a_short_frame_waits_for_its_rest() -> None:
    frame = encode_frame(Probe(1))
    decoder = replica_decoder()
    assert decoder.feed(frame[:-1]) == []
    assert decoder.feed(frame[-1:]) == [Probe(1)]
