"""Decides, step by step, which sequences compute how many tokens. A pure state machine.

    add ──► waiting ──► running ──► finished        schedule() ─► the caller runs the model ─► update()
              ▲            │
              └────────────┘ preempted: blocks freed, recomputed later

There is no prefill or decode phase: a schedule is {sequence: number of new tokens}. The budget of a step
goes first to running sequences that need one token, then to running ones in the middle of their prompt,
then to waiting ones; each group in order of arrival. Hence a long prompt cannot stall running streams,
and as nothing overtakes the head of the waiting line, short ones cannot starve a long one.

Why every admitted sequence finishes: both lists are in order of arrival and only the last running one is
ever preempted, so the oldest always advances; and no sequence is added whose full length would not fit
the pool alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.identity import ID_BYTES, block_identities, split_identities
from headrace.core.messages import FinishReason
from headrace.core.request import Request
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.kvcache.block_pool import BlockPool


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


@dataclass
class Counters:
    """Sums since the scheduler was made, in tokens except ``num_preemptions``.

    Queries, hits and ``prompt_tokens`` count each sample once, when it is first admitted;
    ``computed_prompt_tokens`` counts prompt positions as often as they were computed.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0


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
        self._root = root
        self._eos_token_ids = frozenset(eos_token_ids)
        self._arrivals = 0
        self._num_queued_tokens = 0
        self._running: list[Sequence] = []  # by arrival
        self._waiting: deque[Sequence] = deque()  # by arrival
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
        """Waiting, preempted and held sequences."""
        return sum(map(len, self._sequences.values())) - len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to compute; for those that wait, as the cache was when they came.

        Samples that are held count nothing, as they will find their leader's blocks.
        """
        return self._num_queued_tokens

    def add(self, request: Request) -> list[Sequence]:
        """Puts a request's samples in line and returns them.

        Samples 1.. are held until the first one's prompt is computed, then take its blocks from the
        cache. Raises ContextLengthError or InvalidRequestError, and then adds nothing.
        """
        tokens = request.token_ids()
        max_length = self._max_length(request, len(tokens))
        known = self._sequences.get(request.request_id, {})
        indices = range(request.sample_index, request.sample_index + request.sampling.n)
        if any(index in known for index in indices):
            raise InvalidRequestError(
                f"request {request.request_id!r} is already running; ids must be unique", param="request_id"
            )
        block_ids = self._prompt_identities(request, tokens)
        samples: list[Sequence] = []
        for index in indices:
            copy = array("I", tokens) if samples else tokens
            sequence = Sequence(request, index, copy, max_length=max_length, arrival=self._arrivals)
            sequence.block_ids = list(block_ids)
            self._arrivals += 1
            samples.append(sequence)
        self._sequences.setdefault(request.request_id, {}).update(zip(indices, samples, strict=True))
        first, rest = samples[0], samples[1:]
        self._waiting.append(first)
        if self._may_hit(first):
            self._queue(first, len(tokens) - len(self._hits(first)) * self.config.block_size)
            first.followers = rest
            for sequence in rest:
                sequence.status = SequenceStatus.HELD
        else:
            self._waiting.extend(rest)
            for sequence in samples:
                self._queue(sequence, len(tokens))
        return samples

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
            if len(sequence.tokens) - computed > 1:
                prefills.append(sequence)
                continue
            table = sequence.block_table
            if computed == len(table) * block_size:
                while not pool.num_free:
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
            if not self._admit(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            _insert(running, sequence)
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
        self.block_pool.reset()
        for sequence in self._running:
            sequence.caches_blocks = False

    def holders(self, blocks: Collection[int]) -> list[Sequence]:
        """The running sequences that have any of ``blocks``."""
        return [sequence for sequence in self._running if not set(blocks).isdisjoint(sequence.block_table)]

    def check_integrity(self) -> None:
        """Asserts that lists, tables and pool agree, and that nothing is held when idle."""
        running, waiting = self._running, list(self._waiting)
        held = [f for s in running + waiting for f in s.followers]
        everything = running + waiting + held
        registered = [s for samples in self._sequences.values() for s in samples.values()]
        assert len({id(s) for s in everything}) == len(everything), "a sequence is in two lists"
        assert {id(s) for s in everything} == {id(s) for s in registered}, "a sequence is lost"
        limit = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        assert len(running) <= limit, "more sequences run than can advance in each step"
        for line in (running, waiting):
            assert [s.arrival for s in line] == sorted(s.arrival for s in line), "out of order"
        assert all(s.status is SequenceStatus.RUNNING for s in running)
        assert all(s.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED) for s in waiting)
        assert all(s.status is SequenceStatus.HELD for s in held)
        block_size = self.config.block_size
        for s in running:
            assert s.num_computed_tokens < s.num_tokens < s.max_length, s
            assert len(s.block_table) * block_size >= s.num_computed_tokens, s
            if self.config.enable_prefix_caching:
                assert s.num_registered_blocks == s.num_computed_tokens // block_size <= len(s.block_ids), s
        assert all(not s.block_table and not s.num_computed_tokens for s in waiting + held)
        assert self._num_queued_tokens == sum(s.num_queued_tokens for s in everything)
        assert all(s.num_queued_tokens == max(0, s.prompt_length - s.num_computed_tokens) for s in running)
        assert all(0 < s.num_queued_tokens <= s.prompt_length for s in waiting)
        assert not any(s.num_queued_tokens for s in held)
        self.block_pool.check_integrity(s.block_table for s in running)

    def _max_length(self, request: Request, length: int) -> int:
        """Prompt plus output at which a request ends; raises if it cannot be served."""
        sampling, context = request.sampling, self.config.max_model_len
        if length == 0:
            raise InvalidRequestError("the prompt must hold at least one token, got none", param="prompt")
        limit = length - 1 if sampling.n == 1 else 0  # output belongs to one sample
        if not 0 <= request.num_output_tokens <= limit:
            raise InvalidRequestError(
                f"num_output_tokens must be in [0, {limit}] for a prompt of {length} tokens and n = "
                f"{sampling.n}, got {request.num_output_tokens}",
                param="num_output_tokens",
            )
        if length >= context:
            raise ContextLengthError(
                f"the prompt has {length} tokens; the context holds {context}, of which at least one is "
                "for output",
                hint="shorten the prompt, or raise --max-model-len if the model allows it",
                param="prompt",
            )
        max_length = context
        if sampling.max_tokens is not None:
            max_length = min(context, length - request.num_output_tokens + sampling.max_tokens)
        if max_length <= length:
            raise InvalidRequestError(
                f"max_tokens is {sampling.max_tokens}, and {request.num_output_tokens} output tokens are in "
                "the prompt already: nothing is left to generate",
                param="max_tokens",
            )
        capacity = self.block_pool.num_blocks * self.config.block_size
        if max_length - 1 > capacity:  # the last token is sampled but never computed
            raise ContextLengthError(
                f"prompt and output may reach {max_length} tokens; the KV cache holds {capacity}",
                hint="lower max_tokens, or raise --kv-cache-gib",
                param="max_tokens",
            )
        return max_length

    def _prompt_identities(self, request: Request, tokens: array[int]) -> list[bytes]:
        """The chain of the prompt's full blocks; what the request brought is completed, not recomputed."""
        if not self.config.enable_prefix_caching:
            return []
        block_size = self.config.block_size
        full = len(tokens) // block_size
        if len(request.block_ids) % ID_BYTES or len(request.block_ids) > full * ID_BYTES:
            raise InvalidRequestError(
                f"block_ids must hold {ID_BYTES} bytes for each of at most {full} full blocks of "
                f"{block_size} tokens, got {len(request.block_ids)} bytes",
                param="block_ids",
            )
        block_ids = split_identities(request.block_ids)
        if len(block_ids) < full:
            parent = block_ids[-1] if block_ids else self._root
            block_ids += block_identities(parent, tokens, block_size, start_block=len(block_ids))
        return block_ids

    def _may_hit(self, sequence: Sequence) -> bool:
        """Whether cached blocks may be used: log-probabilities of the prompt need all its positions."""
        if not self.config.enable_prefix_caching:
            return False
        return sequence.sampling.prompt_logprobs is None or sequence.num_sampled_tokens > 0

    def _hits(self, sequence: Sequence) -> list[int]:
        """Cached blocks that it would begin with. The last token's logits are needed, so the block of that
        one is computed anyway."""
        return self.block_pool.lookup(
            sequence.block_ids[: (len(sequence.tokens) - 1) // self.config.block_size]
        )

    def _queue(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts ``num_tokens`` of its prompt as still to compute, instead of what was counted before."""
        self._num_queued_tokens += num_tokens - sequence.num_queued_tokens
        sequence.num_queued_tokens = num_tokens

    def _take(self, sequence: Sequence, budget: int, ones: list[Entry], chunks: list[Entry]) -> int:
        """Gives a sequence as much of the budget as it can use; returns the rest."""
        missing = len(sequence.tokens) - sequence.num_computed_tokens
        count = min(missing, budget)
        if count == 1:
            ones.append(Entry(sequence, 1, missing == 1))
        elif count:
            chunks.append(Entry(sequence, count, count == missing))
        return budget - count

    def _admit(self, sequence: Sequence) -> bool:
        """Takes blocks for all known tokens of the head of the waiting line, cached ones first.

        All at once, because a prompt that starts without room for its rest would be preempted half
        computed, and because its blocks then have consecutive numbers. One free block per running
        sequence stays in reserve, so that its next token does not preempt who was just admitted.
        """
        pool = self.block_pool
        blocked, num_frees = self._blocked
        if self._running and blocked is sequence and num_frees == pool.num_frees:
            return False
        block_size = self.config.block_size
        num_tokens = len(sequence.tokens)
        hits = self._hits(sequence) if self._may_hit(sequence) else []
        missing = -(-num_tokens // block_size) - len(hits)
        if missing + pool.count_free(hits) + len(self._running) > pool.num_free:
            assert self._running, "a sequence was added that does not fit the pool"
            self._blocked = sequence, pool.num_frees
            return False
        pool.acquire(hits)
        sequence.block_table = hits + pool.allocate(missing, hits[-1] if hits else -1)
        sequence.num_computed_tokens = len(hits) * block_size
        sequence.num_registered_blocks = len(hits)
        sequence.caches_blocks = True
        sequence.status = SequenceStatus.RUNNING
        self._queue(sequence, max(0, sequence.prompt_length - sequence.num_computed_tokens))
        if not sequence.num_preemptions:
            sequence.num_hit_tokens = len(hits) * block_size
            sequence.num_cached_tokens = min(sequence.num_hit_tokens, sequence.num_prompt_tokens)
            self.counters.prompt_tokens += num_tokens
            if self._may_hit(sequence):
                self.counters.prefix_cache_queries += num_tokens
                self.counters.prefix_cache_hits += len(hits) * block_size
        return True

    def _preempt_last(self) -> Sequence:
        """Sends the running sequence that arrived last back to the waiting line, without its blocks."""
        sequence = self._running.pop()
        self.block_pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.PREEMPTED
        self.counters.num_preemptions += 1
        self._queue(sequence, sequence.prompt_length)
        _insert(self._waiting, sequence)
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
        _insert(self._waiting, held)

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
        self.block_pool.free(sequence.block_table)
        sequence.block_table = []
        self._queue(sequence, 0)
        samples = self._sequences[sequence.request_id]
        del samples[sequence.sample_index]
        if not samples:
            del self._sequences[sequence.request_id]
        if sequence.followers:
            heir, *rest = sequence.followers
            heir.followers, sequence.followers = rest, []
            self._let_wait(heir)


def _insert(line: list[Sequence] | deque[Sequence], sequence: Sequence) -> None:
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
