"""What one cache of the whole fleet's size would hit: the bound that routing is measured against."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.identity import block_identities
from headrace.kvcache.block_pool import BlockPool


def ideal_hit_rate(
    prompts: Iterable[tuple[bytes, list[bytes], int]], num_blocks: int, block_size: int
) -> float:
    """Share of prompt tokens found in one BlockPool of ``num_blocks`` that serves the prompts one by one.

    Each prompt is its tokens (little-endian uint32), the identities of its full blocks and the number of
    tokens generated after it, whose blocks take room too. Nothing runs at once, so nothing is pinned and
    nothing is missed because it is still being computed.
    """
    pool = BlockPool(num_blocks, block_size)
    num_tokens = num_hits = 0
    for number, (tokens, block_ids, num_output_tokens) in enumerate(prompts):
        length = len(tokens) // 4
        # What the scheduler looks up: the last token is always computed.
        hits = pool.lookup(block_ids[: (length - 1) // block_size])
        num_tokens += length
        num_hits += len(hits) * block_size
        computed = length + num_output_tokens - 1  # the last token is sampled, never computed
        pool.acquire(hits)
        table = hits + pool.allocate(-(-computed // block_size) - len(hits), hits[-1] if hits else -1)
        full = computed // block_size
        parent = block_ids[-1] if block_ids else bytes(32)
        output = number.to_bytes(8, "little") * (block_size // 2) * (full - len(block_ids))
        chain = block_ids + block_identities(parent, output, block_size)
        known = len(hits)
        pool.register(table[known:full], chain[known:full], chain[known - 1] if known else bytes(32))
        pool.free(table)
        pool.take_events()
    return num_hits / num_tokens if num_tokens else 0.0
