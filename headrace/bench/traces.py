"""Recorded traffic: Mooncake's traces (github.com/kvcache-ai/Mooncake, Apache-2.0), one JSON object a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ... 2354]}

``timestamp`` is in milliseconds. Each of ``hash_ids`` stands for 512 tokens of the prompt, the last for what
is left; equal ids mean equal tokens after an equal prefix. The texts are not in the trace: tokens are made up
from the ids, so that prompts share exactly the prefixes that they shared when they were recorded.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from headrace.core.errors import UsageError

HASH_TOKENS = 512
_DIGITS = struct.Struct("<III")


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded request. ``timestamp`` in milliseconds, lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    def prompt(self, vocab_size: int) -> bytes:
        """Token ids as little-endian uint32, below ``vocab_size``."""
        blocks = [
            _DIGITS.pack(
                number % vocab_size, number // vocab_size % vocab_size, number // vocab_size**2
            ).ljust(4 * HASH_TOKENS, b"\0")
            for number in self.hash_ids
        ]
        return b"".join(blocks)[: 4 * self.input_length]


class Arrival(msgspec.Struct, frozen=True):
    """A request and when it comes, in seconds after the first moment of the replay."""

    at: float
    request: TraceRequest


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a trace file in order of arrival; UsageError names the file and the line at fault."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"cannot read the trace {path}: {error.strerror}",
            hint="give the folder that holds Mooncake's traces: --traces DIR or HEADRACE_TRACES",
        ) from None
    decoder = msgspec.json.Decoder(TraceRequest)
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
        blocks = -(-request.input_length // HASH_TOKENS)
        if request.input_length < 1 or request.output_length < 1 or len(request.hash_ids) != blocks:
            raise UsageError(
                f"{path}, line {number}: {request.input_length} prompt tokens need {blocks} hash_ids and at "
                f"least one output token, got {len(request.hash_ids)} and {request.output_length}"
            )
        requests.append(request)
    if not requests:
        raise UsageError(f"the trace {path} holds no requests")
    return sorted(requests, key=lambda request: request.timestamp)


def slices(requests: Sequence[TraceRequest], count: int) -> list[list[TraceRequest]]:
    """``count`` runs of consecutive requests of equal length; what is left over at the end is dropped."""
    length = len(requests) // count
    return [list(requests[i * length : (i + 1) * length]) for i in range(count)]


def arrivals(requests: Sequence[TraceRequest], seconds: float, rng: random.Random) -> list[Arrival]:
    """The requests in their order, their timestamps stretched over ``seconds``.

    Timestamps are rounded in the recording (to 3 s in the conversation trace): requests that share one are
    spread over the time until the next one, at random and in their order.
    """
    groups = [(stamp, list(group)) for stamp, group in groupby(requests, key=lambda r: r.timestamp)]
    first, last = groups[0][0], groups[-1][0]
    step = (last - first) / (len(groups) - 1) if len(groups) > 1 else 1.0
    ends = [stamp for stamp, _ in groups[1:]] + [last + step]
    scale = seconds / (ends[-1] - first)
    result = []
    for (stamp, group), end in zip(groups, ends, strict=True):
        places = sorted(rng.random() for _ in group) if len(group) > 1 else [0.0]
        result += [
            Arrival((stamp + place * (end - stamp) - first) * scale, request)
            for place, request in zip(places, group, strict=True)
        ]
    return result
