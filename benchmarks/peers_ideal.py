"""What one cache of a fleet's total size would find, for requests whose answers are known."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headrace.core.identity import block_identities
from headrace.kvcache.block_pool import BlockPool

ROOT = bytes(32)
Requests = Sequence[tuple[list[int], list[int]]]
"""For each its prompt's tokens, and those of prompt and answer together."""


def block_hit_rate(requests: Requests, num_blocks: int, block_size: int) -> float:
    """Share of prompt tokens found in one pool of blocks, oldest evicted first, requests one by one."""
    pool = BlockPool(num_blocks, block_size)
    num_tokens = num_hits = 0
    for prompt, whole in requests:
        chain = block_identities(ROOT, array("I", whole), block_size)
        hits = pool.lookup(chain[: (len(prompt) - 1) // block_size])  # the last token is always computed
        num_tokens += len(prompt)
        num_hits += len(hits) * block_size
        computed = len(whole) - 1  # the last token is sampled, never computed
        pool.acquire(hits)
        table = hits + pool.allocate(-(-computed // block_size) - len(hits), hits[-1] if hits else -1)
        full, known = computed // block_size, len(hits)
        pool.register(table[known:full], chain[known:full], chain[known - 1] if known else ROOT)
        pool.free(table)
        pool.take_events()
    return num_hits / num_tokens if num_tokens else 0.0


def longest_prefix_hit_rate(requests: Requests) -> float:
    """Share of prompt tokens shared with the beginning of any earlier sequence, of which all are kept."""
    earlier: list[list[int]] = []
    num_tokens = num_hits = 0
    for prompt, whole in requests:
        longest = max((_common(prompt, other) for other in earlier), default=0)
        num_tokens += len(prompt)
        num_hits += min(longest, len(prompt) - 1)
        earlier.append(whole[:-1])  # the last token is sampled, never computed
    return num_hits / num_tokens if num_tokens else 0.0


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix, by bisection: slices compare fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
