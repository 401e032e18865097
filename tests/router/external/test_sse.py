"""Server-sent events cut at every place."""

from __future__ import annotations

import time

import pytest

from headrace.router.external.sse import MAX_EVENT_BYTES, EventTooLargeError, SSEReader

STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\nid: 4\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_come_whole_however_they_are_cut(size):
    reader = SSEReader()
    events = []
    for start in range(0, len(STREAM), size):
        events += reader.feed(STREAM[start : start + size])
    assert events == EVENTS


def test_an_event_without_end_is_refused():
    reader = SSEReader()
    with pytest.raises(EventTooLargeError):
        for _ in range(MAX_EVENT_BYTES // 2**20 + 1):
            reader.feed(b"x" * 2**20)


def test_an_event_of_endless_lines_is_refused():
    reader = SSEReader()
    with pytest.raises(EventTooLargeError):
        for _ in range(MAX_EVENT_BYTES // 2**20 + 1):
            reader.feed(b"data: " + b"x" * 2**20 + b"\n")


def test_a_long_event_in_many_pieces_costs_no_more_than_its_length():
    reader = SSEReader()
    began = time.process_time()
    assert reader.feed(b"data: ") == []
    for _ in range(12_000):
        assert reader.feed(b"x" * 1024) == []
    (event,) = reader.feed(b"\n\n")
    assert len(event) == 12_000 * 1024
    assert time.process_time() - began < 2.0
