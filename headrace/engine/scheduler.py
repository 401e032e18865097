"""Decides, step by step, which sequences compute how many tokens. A pure state machine.

    add ──► waiting ──► running ──► finished        schedule() ─► the caller runs the model ─► update()
             ▲ │  ▲        │
             │ │  └────────┘ preempted: blocks freed, recomputed later
             │ ▼
           filling: out of the line while a source brings blocks that memory lacks (``engine.fill``)

There is no prefill or decode phase: a schedule is {sequence: number of new tokens}. The budget of a step
goes first to running sequences that need one token, then to running ones in the middle of their prompt,
then to waiting ones; each group in order of arrival. Hence a long prompt cannot stall running streams,
and as nothing overtakes the head of the waiting line, short ones cannot starve a long one. Whoever waits
for a fill is overtaken, but not for long: a fill has a deadline, and then its place in line is by arrival.

Why every admitted sequence finishes: both lists are in order of arrival and only the last running one is
ever preempted, so the oldest always advances; and no sequence is added whose full length would not fit
the pool alone. Blocks that a fill brought are held for their sequence only until somebody needs them who
runs, or who is before it in line.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq

from headrace.core.errors import InvalidRequestError
from headrace.core.identity import block_identities
from headrace.core.messages import FinishReason
from headrace.core.request import Request
from headrace.engine.integrity import check_sequences
from headrace.engine.prompt import max_length, prompt_identities
from headrace.engine.schedule import Counters, Entry, Fills, Schedule, SchedulerConfig
from headrace.engine.sequence import Sequence, SequenceStatus, insert_by_arrival
from headrace.kvcache.block_pool import BlockPool

# A fill may end early for want of blocks. It may be tried once more when its sequence is about to run.
MAX_FILLS = 2


class Scheduler:
    """Schedules sequences over the blocks of ``block_pool``.

    ``root`` is the parent of first blocks' identities (``core.identity.root_identity``). A schedule
    that is dropped because the model failed costs nothing: state advances in ``update`` alone.
    """

    def __init__(
        self, config: SchedulerConfig, block_pool: BlockPool, root: bytes, eos_token_ids: Collection[int]
    ) -> None:
        assert config.block_size == block_pool.block_size
        assert config.max_num_seqs > 0 and config.max_num_batched_tokens > 0 and config.max_model_len > 0
        self.config = config
        self.block_pool = block_pool
        self.counters = Counters()
        self.fills: Fills | None = None
        self._root = root
        self._eos_token_ids = frozenset(eos_token_ids)
        self._arrivals = 0
        self._num_queued_tokens = 0
        self._running: list[Sequence] = []  # by arrival
        self._waiting: deque[Sequence] = deque()  # by arrival
        self._filling: list[Sequence] = []
        self._sequences: dict[str, dict[int, Sequence]] = {}  # request id → sample index → unfinished
        self._scheduled: Schedule | None = None
        # The head of the waiting line that found too few blocks, and the pool's num_frees then.
        self._blocked: tuple[Sequence | None, int] = None, -1

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Waiting, filling, preempted and held sequences."""
        return sum(map(len, self._sequences.values())) - len(self._running)

    @property
    def num_filling(self) -> int:
        return len(self._filling)

    @property
    def num_in_line(self) -> int:
        """Sequences that run or could be admitted: the others have to be waited for."""
        return len(self._running) + len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to compute; for those that wait, as the cache was when they came, and
        without what a fill is expected to bring.

        Samples that are held count nothing, as they will find their leader's blocks.
        """
        return self._num_queued_tokens

    def add(self, request: Request) -> list[Sequence]:
        """Puts a request's samples in line and returns them.

        Samples 1.. are held until the first one's prompt is computed, then take its blocks from the
        cache. Raises ContextLengthError or InvalidRequestError, and then adds nothing.
        """
        tokens, block_size = request.token_ids(), self.config.block_size
        capacity = self.block_pool.num_blocks * block_size
        longest = max_length(request, len(tokens), context=self.config.max_model_len, capacity=capacity)
        known = self._sequences.get(request.request_id, {})
        indices = range(request.sample_index, request.sample_index + request.sampling.n)
        if any(index in known for index in indices):
            raise InvalidRequestError(
                f"request {request.request_id!r} is already running; ids must be unique", param="request_id"
            )
        caching = self.config.enable_prefix_caching
        block_ids = prompt_identities(request, tokens, self._root, block_size) if caching else []
        samples: list[Sequence] = []
        for index in indices:
            copy = array("I", tokens) if samples else tokens
            sequence = Sequence(request, index, copy, max_length=longest, arrival=self._arrivals)
            sequence.block_ids = list(block_ids)
            self._arrivals += 1
            samples.append(sequence)
        self._sequences.setdefault(request.request_id, {}).update(zip(indices, samples, strict=True))
        first, rest = samples[0], samples[1:]
        self._waiting.append(first)
        if self._may_hit(first):
            hits = self._hits(first)
            self._queue(first, len(tokens) - len(hits) * block_size)
            first.followers = rest
            for sequence in rest:
                sequence.status = SequenceStatus.HELD
            self._begin_fill(first, hits)
        else:
            self._waiting.extend(rest)
            for sequence in samples:
                self._queue(sequence, len(tokens))
        return samples

    def add_prefill(self, request: Request) -> Sequence:
        """Puts a prompt of full blocks in line that is only computed, for somebody else.

        The sequence keeps its blocks until ``finish`` or ``abort``. Raises InvalidRequestError or
        ContextLengthError, and then adds nothing.
        """
        tokens, block_size = request.token_ids(), self.config.block_size
        assert len(tokens) % block_size == 0 and self.config.enable_prefix_caching
        capacity = self.block_pool.num_blocks * block_size
        max_length(request, len(tokens), context=self.config.max_model_len, capacity=capacity)
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"job {request.request_id!r} is already running", param="request_id")
        sequence = Sequence(
            request, 0, tokens, max_length=len(tokens) + 1, arrival=self._arrivals, prefill_only=True
        )
        sequence.block_ids = prompt_identities(request, tokens, self._root, block_size)
        self._arrivals += 1
        self._sequences[request.request_id] = {0: sequence}
        self._waiting.append(sequence)
        hits = self._hits(sequence)
        self._queue(sequence, len(tokens) - len(hits) * block_size)
        self._begin_fill(sequence, hits)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Ends a running prefill-only sequence whose blocks nobody waits for any more."""
        assert sequence.prefill_only
        self._running.remove(sequence)
        self._finish(sequence, "length")

    def resume(self, sequence: Sequence) -> None:
        """Puts a filling sequence back in line; what it holds stays held until it runs."""
        self._filling.remove(sequence)
        sequence.status = SequenceStatus.PREEMPTED if sequence.num_preemptions else SequenceStatus.WAITING
        if sequence.num_preemptions:
            self._queue(sequence, sequence.prompt_length)
        else:
            num_tokens = len(self._hits(sequence)) * self.config.block_size
            self._queue(sequence, sequence.prompt_length - num_tokens)
        insert_by_arrival(self._waiting, sequence)

    def abort(self, request_id: str, sample_index: int | None = None) -> list[Sequence]:
        """Ends a request's samples, or one of them, wherever they are, and frees their blocks at once.

        Returns those that ended; unknown ids are ignored. Also allowed between ``schedule`` and
        ``update``, which then ignores the entry.
        """
        samples = self._sequences.get(request_id, {})
        chosen = [s for i, s in samples.items() if sample_index is None or i == sample_index]
        for sequence in reversed(chosen):  # followers before the sample that holds them
            if sequence.status is SequenceStatus.RUNNING:
                self._running.remove(sequence)
            elif sequence.status is SequenceStatus.HELD:
                leader = next(s for s in samples.values() if sequence in s.followers)
                leader.followers.remove(sequence)
            elif sequence.status is SequenceStatus.FILLING:
                self._filling.remove(sequence)
            else:
                self._waiting.remove(sequence)
            self._finish(sequence, "abort")
        return chosen

    def schedule(self) -> Schedule:
        """The next step's work; admits, and preempts when blocks run out. Empty when nothing is to do."""
        ones: list[Entry] = []
        prefills: list[Sequence] = []
        preempted: list[Sequence] = []
        admitted: list[Sequence] = []
        pool, block_size, running = self.block_pool, self.block_pool.block_size, self._running
        position = 0
        while position < len(running):  # shrinks from its end while sequences are preempted
            sequence = running[position]
            position += 1
            computed = sequence.num_computed_tokens
            if len(sequence.tokens) - computed > 1 or sequence.prefill_only:
                prefills.append(sequence)
                continue
            table = sequence.block_table
            if computed == len(table) * block_size:
                while not pool.num_free and not self._reclaim(1):
                    preempted.append(self._preempt_last())
                if sequence.status is not SequenceStatus.RUNNING:
                    break
                table += pool.allocate(1, table[-1])
            ones.append(Entry(sequence, 1, True))
        budget = self.config.max_num_batched_tokens - len(ones)
        chunks: list[Entry] = []
        for sequence in prefills:
            budget = self._take(sequence, budget, ones, chunks)
        # Who runs has its token by now, so no more run than a step has tokens, and all advance in each.
        while budget and self._waiting and not preempted and len(running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            hits = self._fitting(sequence)
            if hits is None:
                break
            if self._begin_fill(sequence, hits):
                continue
            self._admit(sequence, hits)
            self._waiting.popleft()
            insert_by_arrival(running, sequence)
            if not sequence.num_preemptions:
                admitted.append(sequence)
            budget = self._take(sequence, budget, ones, chunks)
        self._scheduled = Schedule(
            ones + chunks, len(ones), self.config.max_num_batched_tokens - budget, preempted, admitted
        )
        return self._scheduled

    def update(self, schedule: Schedule, tokens: Seq[int]) -> list[Sequence]:
        """Books a step that ran: ``tokens`` holds one sampled id per entry with ``samples``, in order.

        Returns the sequences that finished; their blocks are free, and full ones can be hit.
        """
        assert schedule is self._scheduled, "not the latest schedule, or booked twice"
        self._scheduled = None
        block_size, caching = self.config.block_size, self.config.enable_prefix_caching
        counters = self.counters
        sampled = iter(tokens)
        finished: list[Sequence] = []
        for sequence, num_new_tokens, samples in schedule.entries:
            token = next(sampled) if samples else -1
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # aborted since
            before = sequence.num_computed_tokens
            computed = before + num_new_tokens
            sequence.num_computed_tokens = computed
            prompt_length = sequence.prompt_length
            if before < prompt_length:
                counters.computed_prompt_tokens += min(computed, prompt_length) - before
                self._queue(sequence, max(0, prompt_length - computed))
            if caching and computed // block_size > sequence.num_registered_blocks:
                self._register_full_blocks(sequence)
            if sequence.followers and computed >= prompt_length:
                self._release_followers(sequence)
            if samples:
                sequence.tokens.append(token)
                sequence.num_sampled_tokens += 1
                counters.generation_tokens += 1
                reason = self._stop_reason(sequence, token)
                if reason is not None:
                    self._finish(sequence, reason)
                    finished.append(sequence)
        assert next(sampled, None) is None, "more sampled tokens than entries that sample"
        if finished:
            self._running = [s for s in self._running if s.status is SequenceStatus.RUNNING]
        return finished

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached, as nobody may reuse it. Running sequences go on, but what they hold, and
        what is computed from it, is not cached any more."""
        self.forget_cached()
        for sequence in self._running:
            sequence.caches_blocks = False

    def forget_cached(self) -> None:
        """Forgets what is cached; what running sequences hold and compute can be found again later."""
        self.block_pool.reset()
        for sequence in (*self._filling, *self._waiting):
            self._let_go(sequence)

    def holders(self, blocks: Collection[int]) -> list[Sequence]:
        """The running sequences that have any of ``blocks``."""
        return [sequence for sequence in self._running if not set(blocks).isdisjoint(sequence.block_table)]

    def check_integrity(self) -> None:
        """Asserts that lists, tables and pool agree, and that nothing is held when idle."""
        registered = [s for samples in self._sequences.values() for s in samples.values()]
        queued = check_sequences(
            self.config, self.block_pool, self._running, self._waiting, self._filling, registered
        )
        assert self._num_queued_tokens == queued, "queued tokens are miscounted"

    def _may_hit(self, sequence: Sequence) -> bool:
        """Whether cached blocks may be used: log-probabilities of the prompt need all its positions."""
        if not self.config.enable_prefix_caching:
            return False
        return sequence.sampling.prompt_logprobs is None or sequence.num_sampled_tokens > 0

    def _hits(self, sequence: Sequence) -> list[int]:
        """Cached blocks that it would begin with."""
        return self.block_pool.lookup(
            sequence.block_ids[: sequence.num_reusable_blocks(self.config.block_size)]
        )

    def _queue(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts ``num_tokens`` of its prompt as still to compute, instead of what was counted before."""
        self._num_queued_tokens += num_tokens - sequence.num_queued_tokens
        sequence.num_queued_tokens = num_tokens

    def _take(self, sequence: Sequence, budget: int, ones: list[Entry], chunks: list[Entry]) -> int:
        """Gives a sequence as much of the budget as it can use; returns the rest."""
        missing = len(sequence.tokens) - sequence.num_computed_tokens
        count = min(missing, budget)
        if count:
            samples = count == missing and not sequence.prefill_only
            (ones if count == 1 else chunks).append(Entry(sequence, count, samples))
        return budget - count

    def _fitting(self, sequence: Sequence) -> list[int] | None:
        """Cached blocks that the head of the waiting line would begin with; None: there is no room for it.

        It needs blocks for all known tokens at once, because a prompt that starts without room for its rest
        would be preempted half computed, and because its blocks then have consecutive numbers. One free
        block per running sequence stays in reserve, so that its next token does not preempt who was just
        admitted.
        """
        pool = self.block_pool
        blocked, num_frees = self._blocked
        if self._running and blocked is sequence and num_frees == pool.num_frees:
            return None
        hits = self._hits(sequence) if self._may_hit(sequence) else []
        missing = -(-len(sequence.tokens) // self.config.block_size) - len(hits)
        needed = missing + pool.count_free(hits) + len(self._running)
        if needed > pool.num_free:
            self._reclaim(needed - pool.num_free, sequence)
            # a hit that somebody else held may be free now
            needed = missing + pool.count_free(hits) + len(self._running)
        if needed > pool.num_free:
            assert self._running or self._filling, "a sequence was added that does not fit the pool"
            self._blocked = sequence, pool.num_frees
            return None
        return hits

    def _admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Lets a sequence that fits run, beginning with the cached blocks ``hits``."""
        pool, block_size, num_tokens = self.block_pool, self.config.block_size, len(sequence.tokens)
        pool.acquire(hits)
        self._let_go(sequence)
        missing = -(-num_tokens // block_size) - len(hits)
        sequence.block_table = hits + pool.allocate(missing, hits[-1] if hits else -1)
        sequence.num_computed_tokens = len(hits) * block_size
        sequence.num_registered_blocks = len(hits)
        sequence.caches_blocks = True
        sequence.status = SequenceStatus.RUNNING
        sequence.num_fills = 0
        self._queue(sequence, max(0, sequence.prompt_length - sequence.num_computed_tokens))
        if not sequence.num_preemptions:
            filled = max(0, len(hits) - sequence.first_filled_block)
            sequence.num_disk_blocks = min(sequence.num_disk_blocks, filled)
            sequence.num_fetched_blocks = min(sequence.num_fetched_blocks, filled - sequence.num_disk_blocks)
            cached = (len(hits) - sequence.num_fetched_blocks) * block_size
            sequence.num_hit_tokens = len(hits) * block_size
            sequence.num_cached_tokens = min(cached, sequence.num_prompt_tokens)
            self.counters.prompt_tokens += num_tokens
            if self._may_hit(sequence):
                self.counters.prefix_cache_queries += num_tokens
                self.counters.prefix_cache_hits += cached

    def _begin_fill(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether a sequence left the waiting line, as blocks that memory lacks come from elsewhere."""
        missing = sequence.num_reusable_blocks(self.config.block_size) - len(hits)
        missing = min(missing, len(sequence.block_ids) - len(hits))
        if self.fills is None or missing <= 0 or not self._may_hit(sequence):
            return False
        if sequence.num_fills == MAX_FILLS:
            return False
        expected = self.fills.begin(sequence, len(hits))
        if not expected:
            return False
        sequence.num_fills += 1
        self.block_pool.acquire(hits)
        self._let_go(sequence)
        sequence.held_blocks = hits
        sequence.status = SequenceStatus.FILLING
        self._waiting.remove(sequence)
        self._filling.append(sequence)
        num_tokens = (len(hits) + expected) * self.config.block_size
        self._queue(sequence, max(0, sequence.prompt_length - num_tokens))
        return True

    def _let_go(self, sequence: Sequence) -> None:
        """Drops what a sequence holds before it runs; the blocks stay cached until somebody needs them."""
        if sequence.held_blocks:
            self.block_pool.free(sequence.held_blocks)
            sequence.held_blocks = []

    def _reclaim(self, count: int, before: Sequence | None = None) -> bool:
        """Takes back blocks that fills hold for sequences which do not run yet, from the youngest first,
        until ``count`` more are free; only from those behind ``before``. Whether any is free now."""
        pool = self.block_pool
        goal = pool.num_free + count
        holders = [s for s in (*self._filling, *self._waiting) if s.held_blocks]
        for sequence in sorted(holders, key=lambda s: s.arrival, reverse=True):
            if pool.num_free >= goal or (before is not None and sequence.arrival <= before.arrival):
                break
            self._let_go(sequence)
        return pool.num_free > 0

    def _preempt_last(self) -> Sequence:
        """Sends the running sequence that arrived last back to the waiting line, without its blocks."""
        sequence = self._running.pop()
        if sequence.on_release is not None:
            sequence.on_release()
        self.block_pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.PREEMPTED
        self.counters.num_preemptions += 1
        self._queue(sequence, sequence.prompt_length)
        insert_by_arrival(self._waiting, sequence)
        return sequence

    def _register_full_blocks(self, sequence: Sequence) -> None:
        """Tells the pool which blocks the last step filled; their chain grows with the output."""
        block_size, block_ids = self.config.block_size, sequence.block_ids
        first, full = sequence.num_registered_blocks, sequence.num_computed_tokens // block_size
        known = len(block_ids)
        if known < full:
            parent = block_ids[-1] if block_ids else self._root
            block_ids += block_identities(
                parent, sequence.tokens[known * block_size : full * block_size], block_size
            )
        parent = block_ids[first - 1] if first else self._root
        if sequence.caches_blocks:
            self.block_pool.register(sequence.block_table[first:full], block_ids[first:full], parent)
        sequence.num_registered_blocks = full

    def _release_followers(self, leader: Sequence) -> None:
        for sequence in leader.followers:
            self._let_wait(sequence)
        leader.followers = []

    def _let_wait(self, held: Sequence) -> None:
        held.status = SequenceStatus.WAITING
        self._queue(held, held.prompt_length - len(self._hits(held)) * self.config.block_size)
        insert_by_arrival(self._waiting, held)

    def _stop_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        if sequence.num_output_tokens >= sampling.min_tokens and (
            token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos)
        ):
            sequence.stop_token = token
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.max_length else None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence that left its list already. If samples wait for it, the next one leads them."""
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if sequence.on_release is not None:
            sequence.on_release()
        self.block_pool.free(sequence.block_table or sequence.held_blocks)
        sequence.block_table, sequence.held_blocks = [], []
        self._queue(sequence, 0)
        samples = self._sequences[sequence.request_id]
        del samples[sequence.sample_index]
        if not samples:
            del self._sequences[sequence.request_id]
        if sequence.followers:
            heir, *rest = sequence.followers
            heir.followers, sequence.followers = rest, []
            self._let_wait(heir)
