"""What counts as wrong and as slower, on numbers made by hand."""

from __future__ import annotations

import math

import pytest

from headrace.core.messages import Hello, Scored, StepTime, TokenLogprobs
from headrace.fleet import rollout
from headrace.fleet.canary import LEAST_FLOOR, agreement, differences, noise_floor, slowdown
from headrace.fleet.rollout import sample

TOP = [(1, -0.5), (2, -1.5), (3, -3.0)]


def scored(changes: dict[int, float], count: int = 1000) -> Scored:
    """``count`` positions in two sequences; at some, every log-probability is off by so much."""
    entries = []
    for i in range(count):
        off = changes.get(i, 0.0)
        entries.append(TokenLogprobs(2, -1.5 + off, 2, [(token, value + off) for token, value in TOP]))
    return Scored("", [entries[: count // 3], entries[count // 3 :]], [])


def test_the_floor_is_the_largest_difference_of_two_ways_and_never_nothing() -> None:
    assert noise_floor(scored({}), scored({7: 0.02, 900: -0.05})) == pytest.approx(0.05)
    assert noise_floor(scored({}), scored({7: 1e-6})) == LEAST_FLOOR


def test_one_position_in_a_hundred_is_too_many_and_noise_is_not() -> None:
    floor = 0.05
    noisy = agreement(scored({}), scored(dict.fromkeys(range(0, 1000, 3), 0.09)), floor)
    assert noisy.holds and noisy.num_wrong == 0 and noisy.worst == pytest.approx(0.09)
    wrong = agreement(scored({}), scored(dict.fromkeys(range(50, 1000, 100), 0.11)), floor)
    assert not wrong.holds and wrong.num_wrong == 10
    assert "10 of 1000 positions (1.00 %)" in str(wrong)
    assert agreement(scored({}), scored({5: 3.0, 900: 3.0}), floor).holds, "two in a thousand"
    nothing = agreement(scored({}), scored(dict.fromkeys(range(0, 1000, 100), math.nan)), floor)
    assert not nothing.holds and nothing.num_wrong == 10 and nothing.worst == math.inf


def test_a_token_that_is_not_named_is_at_most_as_likely_as_the_last_that_is() -> None:
    one = Scored("", [[TokenLogprobs(9, -6.0, 50, [(1, -0.5), (2, -1.5)])]], [])
    close = Scored("", [[TokenLogprobs(9, -6.0, 50, [(1, -0.5), (3, -1.6)])]], [])
    assert list(differences(one, close)) == [pytest.approx(0.1)]
    far = Scored("", [[TokenLogprobs(9, -6.0, 50, [(7, -0.1), (8, -4.0)])]], [])
    assert list(differences(one, far)) == [pytest.approx(3.5)]
    assert list(differences(one, Scored("", [[TokenLogprobs(9, -6.5, 50, [])]], []))) == [pytest.approx(0.5)]


def test_steps_are_compared_with_steps_of_as_many_rows() -> None:
    before = [StepTime(1, 50, 0.010), StepTime(4, 30, 0.020), StepTime(7, 2, 0.001)]
    ratio, count = slowdown(before, [StepTime(1, 10, 0.011), StepTime(4, 30, 0.020), StepTime(7, 50, 9.0)])
    assert (ratio, count) == (pytest.approx(0.71 / 0.70), 40)
    assert slowdown(before, [StepTime(2, 50, 9.0), StepTime(1, 3, 9.0)]) == (1.0, 0)


def hello(max_model_len: int = 4096) -> Hello:
    return Hello(
        replica_id="r",
        pid=1,
        model="m",
        model_revision="",
        role="unified",
        device="",
        dtype="",
        vocab_size=300,
        max_model_len=max_model_len,
        max_num_seqs=1,
        block_size=4,
        num_blocks=9,
        root_identity=b"",
        eos_token_ids=[],
        load_seconds=0.0,
        weights_bytes=0,
        kv_bytes=0,
        notes=[],
    )


def test_enough_is_scored_whatever_was_recorded() -> None:
    for recorded, limit in (([], 4096), ([b"\1\0\0\0" * 20] * 32, 4096), ([b"\1\0\0\0" * 512] * 32, 4096),
                            ([b"\1\0\0\0" * 512], 50)):  # fmt: skip
        tokens, groups, words = sample(recorded, hello(limit))
        lengths = [len(packed) // 4 for packed in tokens]
        assert sum(lengths) - len(lengths) >= rollout.NUM_POSITIONS and len(tokens) <= 64
        assert sum(groups) >= len(tokens) and groups[:4] == [1, 2, 5, 8]
        assert max(lengths) <= min(limit, rollout.LONG)
        assert ("recorded" in words) == bool(recorded)
    assert "random" in words
