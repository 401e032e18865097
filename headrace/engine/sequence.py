"""One sample of a request while the engine works on it."""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.core.messages import FinishReason
from headrace.core.request import Request


class SequenceStatus(enum.Enum):
    """
    add ──► WAITING ──► RUNNING ──► FINISHED          abort: from anywhere to FINISHED
               ▲           │
    HELD ──────┘           ▼
    (samples 1.. of n)  PREEMPTED ──► RUNNING         FILLING: blocks come from elsewhere; out of the line,
               ▲           ▲                                   back to its place in it when they are there
               └► FILLING ◄┘
    """

    WAITING = "waiting"
    FILLING = "filling"
    HELD = "held"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """Tokens known, tokens computed, and the blocks that hold them. Only the scheduler writes here.

        tokens:   | prompt ............... | output ......... |
                  | num_prompt_tokens      | num_output_tokens |     rescued output counts as output
                  | num_computed_tokens: keys and values are in the cache | still to compute |
        blocks:   | block_table: covers every known token while running, empty otherwise    |
                  | held_blocks: a filled prefix, kept until it runs; found by identity as any     |
                  | block_ids: identities of full blocks, at least of all that are computed |

    ``block_table`` grows by append only; a preemption replaces it by a new list and raises
    ``num_preemptions``. No buffer of ``tokens`` may be kept across ``Scheduler.update``, which appends.
    """

    __slots__ = (
        "added_at",
        "arrival",
        "block_ids",
        "block_table",
        "caches_blocks",
        "fill_s",
        "finish_reason",
        "first_filled_block",
        "followers",
        "held_blocks",
        "max_length",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_disk_blocks",
        "num_fetched_blocks",
        "num_fills",
        "num_hit_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_registered_blocks",
        "num_sampled_tokens",
        "on_release",
        "origin",
        "prefill_only",
        "prompt_length",
        "records",
        "request",
        "request_id",
        "runner_state",
        "sample_index",
        "sampling",
        "started_at",
        "status",
        "stop_token",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        sample_index: int,
        tokens: array[int],
        *,
        max_length: int,
        arrival: int,
        prefill_only: bool = False,
    ) -> None:
        """``max_length``: prompt plus output at which generation ends; ``arrival``: place in line;
        ``prefill_only``: it computes its prompt, keeps the blocks until it is ended, samples nothing."""
        self.request = request
        self.request_id = request.request_id
        self.sample_index = sample_index
        self.sampling = request.sampling
        self.tokens = tokens
        self.prompt_length = len(tokens)  # as the request carried it, rescued output included
        self.num_prompt_tokens = len(tokens) - request.num_output_tokens
        self.num_computed_tokens = 0
        self.num_sampled_tokens = 0  # by this engine
        self.num_hit_tokens = 0  # found in the cache at first admission
        self.num_cached_tokens = 0  # the same, of the prompt alone
        self.num_queued_tokens = 0  # of the prompt, rescued output included, that are still to compute
        self.num_preemptions = 0
        self.num_registered_blocks = 0  # leading blocks whose identity the pool was told
        self.caches_blocks = True  # False: what it holds is of before a reset, for no one else
        self.block_table: list[int] = []
        self.block_ids: list[bytes] = []
        self.prefill_only = prefill_only
        self.on_release: Callable[[], None] | None = None  # to be called before its table is freed
        self.held_blocks: list[int] = []
        self.num_fills = 0  # times it left the line for blocks from elsewhere, since it last ran
        self.first_filled_block = 0  # what memory had when the last fill began
        self.num_disk_blocks = 0  # of the last fill, from ``first_filled_block`` on
        self.num_fetched_blocks = 0  # the same, after those from disk
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.max_length = max_length
        self.arrival = arrival
        self.followers: list[Sequence] = []  # samples held until this one's prompt is computed
        # The engine's to use; times are monotonic.
        self.runner_state: Any = None
        self.records = request.record
        self.origin: Any = None  # what was last told of it
        self.added_at = 0.0
        self.started_at = 0.0
        self.fill_s = 0.0  # time that it waited for blocks from elsewhere before it first ran

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def num_reusable_blocks(self, block_size: int) -> int:
        """Leading blocks that need not be computed if they are there. The last token's logits are needed
        where something is sampled, so the block of that one is computed anyway."""
        return (len(self.tokens) - (not self.prefill_only)) // block_size

    @property
    def num_output_tokens(self) -> int:
        """Rescued and sampled tokens: the position of the next one for sampling, penalties and limits."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> array[int]:
        """A copy of the output so far."""
        return self.tokens[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}/{self.sample_index}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed, {len(self.block_table)} blocks)"
        )


def insert_by_arrival(line: list[Sequence] | deque[Sequence], sequence: Sequence) -> None:
    """Puts a sequence where its arrival belongs. Whoever comes back is near the front of the waiting
    line, whoever is admitted near the end of the running one: searched from there."""
    if isinstance(line, list):
        place = len(line)
        while place and line[place - 1].arrival > sequence.arrival:
            place -= 1
    else:
        place = 0
        while place < len(line) and line[place].arrival < sequence.arrival:
            place += 1
    line.insert(place, sequence)
