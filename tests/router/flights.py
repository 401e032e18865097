"""What the tests of flights share: troubles at a token, and what a sink must have heard."""

from __future__ import annotations

from headrace.core.request import Request
from tests.router.replicas import expected

LENGTH = 8


def once(trouble, *, sample=0, position=3):
    """The trouble, at the first replica that comes to this token."""
    left = [trouble]

    def ask(request, index, at):
        return left.pop() if left and (index, at) == (sample, position) else None

    return ask


def beset(replicas, ask):
    for replica in replicas:
        replica.trouble = ask


def check(sink, request: Request) -> None:
    """Every sample is what it would have been, and ended once."""
    assert sink.error is None
    first = request.sample_index
    for sample in range(first, first + request.sampling.n):
        assert sink.tokens(sample) == expected(request, sample)
        assert sink.reason(sample) == "length"
