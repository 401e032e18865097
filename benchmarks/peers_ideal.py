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
