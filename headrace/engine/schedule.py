"""What the scheduler is told, what it decides for one step, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.engine.sequence import Sequence


@dataclass(frozen=True)
class SchedulerConfig:
    """``max_num_batched_tokens`` bounds one step's tokens, ``max_model_len`` prompt plus output."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    enable_prefix_caching: bool = True


class Entry(NamedTuple):
    """Compute ``sequence.tokens[num_computed_tokens:][:num_new_tokens]``; ``samples``: that reaches the
    last known token, so its logits give the next one."""

    sequence: Sequence
    num_new_tokens: int
    samples: bool


@dataclass(frozen=True)
class Schedule:
    """One step's work. The first ``num_decodes`` entries have one token each, the others more.

    ``admitted`` are scheduled for the first time.
    """

    entries: list[Entry]
    num_decodes: int
    num_tokens: int
    preempted: list[Sequence]
    admitted: list[Sequence]


class Fills(Protocol):
    """Brings blocks that memory lacks. It puts them into ``held_blocks`` of a filling sequence, and calls
    ``Scheduler.resume`` when no more come."""

    def begin(self, sequence: Sequence, num_blocks: int) -> int:
        """How many blocks from number ``num_blocks`` on, the first that memory lacks, are expected; 0: none
        are worth waiting for, and the sequence stays in line."""


@dataclass
class Counters:
    """Sums since the scheduler was made, in tokens except ``num_preemptions``. What another replica computed
    for a request is no hit.

    Queries, hits and ``prompt_tokens`` count each sample once, when it is first admitted;
    ``computed_prompt_tokens`` counts prompt positions as often as they were computed.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
