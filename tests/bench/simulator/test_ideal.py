"""The ideal cache: hits by hand, eviction, and the blocks of the output."""

from __future__ import annotations

import pytest

from headrace.bench.simulator.ideal import ideal_hit_rate
from headrace.core.identity import block_identities
from headrace.core.request import pack_tokens

ROOT = bytes(32)


def prompt(*tokens: int, output: int = 1) -> tuple[bytes, list[bytes], int]:
    packed = pack_tokens(tokens)
    return packed, block_identities(ROOT, packed, 2), output


def test_shared_prefixes_hit_and_the_last_token_never_does() -> None:
    prompts = [prompt(1, 2, 3, 4), prompt(1, 2, 3, 4), prompt(1, 2, 9, 9, 9)]
    # nothing; the first block (the second one holds the last token); the first block
    assert ideal_hit_rate(prompts, num_blocks=10, block_size=2) == pytest.approx((0 + 2 + 2) / 13)


def test_what_was_used_longest_ago_is_evicted() -> None:
    a, b, c = prompt(1, 1, 1), prompt(2, 2, 2), prompt(3, 3, 3)
    # two blocks each while they run, one to keep: the third prompt takes the empty one and the oldest
    assert ideal_hit_rate([a, b, c, b], num_blocks=3, block_size=2) == pytest.approx(2 / 12)
    assert ideal_hit_rate([a, b, c, a], num_blocks=3, block_size=2) == 0.0


def test_output_takes_room_too() -> None:
    a, again = prompt(1, 1, 1, output=2), prompt(1, 1, 1)
    # the second prompt alone leaves the first one's blocks, its output of seven tokens does not
    assert ideal_hit_rate([a, prompt(2, 2, 2), again], num_blocks=4, block_size=2) == pytest.approx(2 / 9)
    assert ideal_hit_rate([a, prompt(2, 2, 2, output=6), again], num_blocks=4, block_size=2) == 0.0


def test_equal_prompts_do_not_share_their_outputs() -> None:
    long = prompt(1, 1, 1, output=4)
    assert ideal_hit_rate([long, long, long], num_blocks=9, block_size=2) == pytest.approx(4 / 9)


def test_nothing_asked_is_no_rate() -> None:
    assert ideal_hit_rate([], num_blocks=4, block_size=2) == 0.0
