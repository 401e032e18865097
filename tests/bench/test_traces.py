"""Traces: what is read, what is refused, and what a replay keeps of it."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

import pytest

from headrace.bench.traces import HASH_TOKENS, TraceRequest, arrivals, read_trace, slices
from headrace.core.errors import UsageError
from headrace.core.identity import block_identities


def line(timestamp: float, length: int, hash_ids: list[int], output: int = 3) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": hash_ids}
    )


def test_requests_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line(30, 600, [1, 2]), "", line(10, 5, [7], output=9)]) + "\n")
    first, second = read_trace(path)
    assert (first.timestamp, first.input_length, first.output_length, first.hash_ids) == (10, 5, 9, [7])
    assert second.hash_ids == [1, 2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"timestamp": 1}', "line 2: .*input_length"),
        (line(1, 513, [1]), "line 2: 513 prompt tokens need 2 hash_ids"),
        (line(1, 0, []), "line 2: "),
        (line(1, 5, [1], output=0), "line 2: .*output token"),
        ("no json", "line 2: "),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line(1, 5, [1]) + "\n" + text + "\n")
    with pytest.raises(UsageError, match=told):
        read_trace(path)


def test_a_missing_file_tells_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_trace(tmp_path / "absent.jsonl")
    assert "absent.jsonl" in caught.value.message
    assert caught.value.hint is not None and "HEADRACE_TRACES" in caught.value.hint


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(UsageError, match="no requests"):
        read_trace(path)


def test_prompts_share_exactly_the_prefixes_that_their_ids_share() -> None:
    def identities(length: int, hash_ids: list[int]) -> list[bytes]:
        prompt = TraceRequest(0, length, 1, hash_ids).prompt(vocab_size=1000)
        assert len(prompt) == 4 * length
        assert max(array("I", prompt)) < 1000
        return block_identities(bytes(32), prompt, HASH_TOKENS)

    one, other = identities(1400, [1, 2, 3]), identities(2000, [1, 2, 4, 5])
    assert len(one) == 2 and len(other) == 3
    assert one == other[:2]
    # ids beyond the vocabulary stay apart, also where they are equal modulo its size
    assert identities(600, [1, 2])[0] != identities(600, [1001, 2])[0]


def test_slices_are_consecutive_and_of_equal_length() -> None:
    requests = [TraceRequest(i, 1, 1, [i]) for i in range(11)]
    parts = slices(requests, 3)
    assert [[r.hash_ids[0] for r in part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_arrivals_keep_order_and_fill_the_time_they_are_stretched_over() -> None:
    requests = [TraceRequest(1000 + 3000 * (i // 10), 1, 1, [i]) for i in range(100)]
    replay = arrivals(requests, 60.0, random.Random(1))
    assert [a.request.hash_ids[0] for a in replay] == list(range(100))
    times = [a.at for a in replay]
    assert times == sorted(times) and times[0] >= 0.0 and times[-1] < 60.0
    # ten groups, each spread over its own tenth of the time
    for group in range(10):
        inside = times[10 * group : 10 * group + 10]
        assert 6.0 * group <= inside[0] <= inside[-1] < 6.0 * (group + 1)
        assert len(set(inside)) == 10


def test_distinct_timestamps_keep_their_proportions() -> None:
    requests = [TraceRequest(stamp, 1, 1, [0]) for stamp in (0, 10, 30)]
    assert [a.at for a in arrivals(requests, 4.5, random.Random(1))] == pytest.approx([0.0, 1.0, 3.0])


def test_the_same_seed_gives_the_same_arrivals() -> None:
    requests = [TraceRequest(0, 1, 1, [i]) for i in range(5)]
    first, again, other = (arrivals(requests, 1.0, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
