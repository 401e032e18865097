from __future__ import annotations

import pytest

from headrace.router.recent import HALF_LIFE_S, Popularity, Sessions


def test_a_session_is_where_it_was_last_and_apart_by_model() -> None:
    sessions = Sessions()
    sessions.set("m", "s", "r0")
    sessions.set("m", "s", "r1")
    assert sessions.get("m", "s") == "r1"
    assert sessions.get("other", "s") is None


def test_the_longest_unused_sessions_are_forgotten() -> None:
    sessions = Sessions(limit=10)
    sessions.set("m", "kept", "r0")
    for i in range(100):
        sessions.set("m", f"s{i}", "r1")
        sessions.set("m", "kept", "r0")
        assert len(sessions) <= 10
    assert sessions.get("m", "kept") == "r0"
    assert sessions.get("m", "s99") == "r1"
    assert sessions.get("m", "s0") is None


def test_others_are_counted_and_fade() -> None:
    popularity = Popularity()
    assert popularity.touch(1, 0.0) == 0.0
    assert popularity.touch(1, 0.0) == 1.0
    assert popularity.touch(2, 0.0) == 0.0
    assert popularity.touch(1, HALF_LIFE_S) == pytest.approx(1.0)
    assert popularity.touch(1, 100 * HALF_LIFE_S) < 1e-6


def test_prefixes_are_bounded() -> None:
    popularity = Popularity(limit=8)
    for key in range(100):
        popularity.touch(key, 0.0)
        assert len(popularity) <= 8
    assert popularity.touch(99, 0.0) == 1.0
