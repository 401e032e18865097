"""What must hold between steps: each sequence in one list, each block accounted for."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.schedule import SchedulerConfig
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.kvcache.block_pool import BlockPool


def check_sequences(
    config: SchedulerConfig,
    pool: BlockPool,
    running: list[Sequence],
    in_line: Iterable[Sequence],
    filling: list[Sequence],
    registered: list[Sequence],
) -> int:
    """Asserts that a scheduler's lists, its sequences' tables and the pool agree; returns the prompt tokens
    that are still to compute."""
    waiting = list(in_line)
    held = [f for s in running + waiting + filling for f in s.followers]
    everything = running + waiting + filling + held
    assert len({id(s) for s in everything}) == len(everything), "a sequence is in two lists"
    assert {id(s) for s in everything} == {id(s) for s in registered}, "a sequence is lost"
    assert len(running) <= config.max_num_seqs
    computing = [s for s in running if s.num_computed_tokens < s.num_tokens]  # the others are being sent
    assert len(computing) <= config.max_num_batched_tokens, "more compute than can advance in each step"
    for line in (running, waiting):
        assert [s.arrival for s in line] == sorted(s.arrival for s in line), "out of order"
    assert all(s.status is SequenceStatus.RUNNING for s in running)
    assert all(s.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED) for s in waiting)
    assert all(s.status is SequenceStatus.FILLING for s in filling)
    assert all(s.status is SequenceStatus.HELD for s in held)
    block_size = config.block_size
    for s in running:
        assert s.num_computed_tokens < s.num_tokens + s.prefill_only <= s.max_length, s
        assert len(s.block_table) * block_size >= s.num_computed_tokens, s
        if config.enable_prefix_caching:
            assert s.num_registered_blocks == s.num_computed_tokens // block_size <= len(s.block_ids), s
    assert all(not s.block_table and not s.num_computed_tokens for s in waiting + filling + held)
    assert not any(s.held_blocks for s in running + held), "what a fill brought is held for nobody"
    for s in waiting + filling:
        found = pool.lookup(s.block_ids[: len(s.held_blocks)])
        assert found == s.held_blocks, "a held block is not the sequence's own"
    assert all(s.num_queued_tokens == max(0, s.prompt_length - s.num_computed_tokens) for s in running)
    assert all(s.prefill_only or s.num_queued_tokens > 0 for s in waiting)
    assert all(0 <= s.num_queued_tokens <= s.prompt_length for s in waiting + filling)
    assert not any(s.num_queued_tokens for s in held)
    pool.check_integrity(s.block_table or s.held_blocks for s in everything)
    return sum(s.num_queued_tokens for s in everything)
