"""A sleeper misses nothing that was left for it before it was woken."""

from __future__ import annotations

import selectors
import threading
from collections import deque

from headrace.replica.waker import Waker

PER_THREAD = 2000
NUM_THREADS = 4


def test_whatever_was_left_before_a_wake_is_seen() -> None:
    waker, left = Waker(), deque[int]()
    selector = selectors.DefaultSelector()
    selector.register(waker, selectors.EVENT_READ)

    def leave() -> None:
        for number in range(PER_THREAD):
            left.append(number)
            waker.wake()

    threads = [threading.Thread(target=leave) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    num_seen = 0
    while num_seen < NUM_THREADS * PER_THREAD:
        assert selector.select(30.0), f"asleep with {len(left)} left"
        assert waker.take()
        while left:
            left.popleft()
            num_seen += 1
    for thread in threads:
        thread.join()
    waker.take()
    assert not waker.take() and not selector.select(0)
    selector.close()
    waker.close()


def test_many_wakes_are_one() -> None:
    waker = Waker()
    assert not waker.take()
    for _ in range(200_000):  # more than a pipe holds, from a thread that must not block
        waker.wake()
    assert waker.take() and not waker.take()
    waker.wake()
    assert waker.take()
    waker.close()
