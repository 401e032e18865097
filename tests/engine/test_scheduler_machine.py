"""Scheduler over tiny pools, at random: whatever is asked, each sample's output is what it would be alone.

Prefixes also come from a disk and another replica, which deliver when, what and if they like; and other
replicas ask for prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.errors import ContextLengthError
from headrace.core.identity import block_identities
from headrace.core.messages import BlocksStored, CacheCleared
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.schedule import Schedule, SchedulerConfig
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.kvcache.block_pool import BlockPool
from headrace.kvcache.connector import SendJob
from tests.engine.kv_oracle import EOS, digests, expected_output
from tests.engine.sources import FillingRig, ListStream, true_payloads

ROOT = b"r" * 32
VOCAB_SIZE = 40


@dataclass
class Shape:
    """How tight the scheduler's resources are."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    caching: bool
    fills: bool


shapes = st.builds(
    Shape,
    block_size=st.integers(1, 4),
    num_blocks=st.integers(10, 24),
    max_num_seqs=st.integers(2, 6),
    max_num_batched_tokens=st.integers(1, 24),
    max_model_len=st.sampled_from([12, 20, 28, 36]),
    caching=st.sampled_from([True, True, True, False]),
    fills=st.booleans(),
)


@dataclass
class Ask:
    """One request: a cut of an earlier text with a new tail."""

    which: int
    length: int
    tail: list[int]
    sampling: SamplingParams
    rescued: int  # of the prompt's last tokens
    told: int  # identities that the request brings
    remote: bool  # another replica computes its prompt


sampling_params = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.sampled_from([None, 3, 6, 10, 15, 20]),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)

asks = st.builds(
    Ask,
    which=st.integers(0, 30),
    length=st.integers(0, 40),
    tail=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    sampling=sampling_params,
    rescued=st.sampled_from([0, 0, 1, 3]),
    told=st.integers(0, 12),
    remote=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps and aborts. Prompts continue earlier ones, or each other, so prefixes are shared."""

    @initialize(shape=shapes)
    def build(self, shape: Shape) -> None:
        self.shape = shape
        config = SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            enable_prefix_caching=shape.caching,
        )
        self.pool = BlockPool(shape.num_blocks, shape.block_size, track_saved=True)
        self.scheduler = Scheduler(config, self.pool, ROOT, [EOS])
        self.rig = FillingRig(self.scheduler, VOCAB_SIZE)
        self.oracle = self.rig.oracle
        if not shape.fills:
            self.scheduler.fills = None
        self.asked: dict[str, tuple[list[int], int, ListStream]] = {}  # prompts for other replicas
        self.requests: dict[str, Request] = {}
        self.alive: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.known: set[bytes] = set()  # identities that the events announced
        self.texts: list[list[int]] = [[7] * 30, [7] * 6 + [8] * 30]  # what prompts are cut from
        self.next_event = 0
        self.budget_of_steps = 0

    @rule(asked=st.lists(asks, min_size=1, max_size=4))
    def add(self, asked: list[Ask]) -> None:
        for ask in asked:
            self.add_one(ask)

    def add_one(self, ask: Ask) -> None:
        shape, sampling, rescued = self.shape, ask.sampling, ask.rescued
        text = self.texts[ask.which % len(self.texts)]
        prompt = text[: 1 + ask.length % (shape.max_model_len - 1)] + ask.tail
        if sampling.n > 1 or rescued >= min(len(prompt), sampling.max_tokens or 99):
            rescued = 0
        chain = block_identities(ROOT, pack_tokens(prompt), shape.block_size) if shape.caching else []
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt=pack_tokens(prompt),
            sampling=sampling,
            num_output_tokens=rescued,
            block_ids=b"".join(chain[: ask.told]),
            prefill_from="unix:/peer" if ask.remote else "",
        )
        limit = len(prompt) - rescued + (sampling.max_tokens or 99)
        fits = min(limit, shape.max_model_len) - 1 <= shape.num_blocks * shape.block_size
        try:
            added = self.scheduler.add(request)
        except ContextLengthError:
            assert len(prompt) >= shape.max_model_len or not fits
            return
        assert fits and len(prompt) < shape.max_model_len and len(added) == sampling.n
        self.requests[request.request_id] = request
        self.alive += added
        self.budget_of_steps += 2 * len(added) * shape.max_model_len

    @rule(
        which=st.integers(0, 30), length=st.integers(0, 40), first=st.integers(0, 3), room=st.integers(0, 9)
    )
    def ask_for_a_prompt(self, which: int, length: int, first: int, room: int) -> None:
        text = self.texts[which % len(self.texts)]
        prompt = text[: 1 + length % (self.shape.max_model_len - 1)]
        key, stream = f"p{len(self.asked)}", ListStream(room)
        self.asked[key] = prompt, first, stream
        self.rig.prefiller.start(SendJob(key, pack_tokens(prompt), first), stream)
        self.budget_of_steps += 2 * self.shape.max_model_len

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30), room=st.integers(0, 9))
    def take_or_leave_a_prompt(self, which: int, room: int) -> None:
        key = list(self.asked)[which % len(self.asked)]
        self.asked[key][2].num_free += room
        if not room:
            self.rig.prefiller.cancel(key)

    @rule(
        disk=st.booleans(),
        which=st.integers(0, 5),
        count=st.integers(1, 8),
        wrong=st.sampled_from([""] * 9 + ["identity", "length", "number"]),
        ends=st.sampled_from([False, False, False, True]),
    )
    def bring(self, disk: bool, which: int, count: int, wrong: str, ends: bool) -> None:
        source = self.rig.disk if disk else self.rig.remote
        if wrong:
            source.deliver_wrong(wrong, which)
        else:
            source.deliver(count, which)
        if ends:
            source.end("that is all", which)

    @rule(seconds=st.sampled_from([0.1, 0.1, 4.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.rig.now += seconds

    @rule(busy=st.booleans(), capacity=st.sampled_from([0, 2, 50, 50]))
    def write_behind(self, busy: bool, capacity: int) -> None:
        self.rig.disk.capacity = capacity
        self.rig.write_behind.advance(busy=busy)
        self.pool.check_integrity(s.block_table or s.held_blocks for s in self.everyone())

    @rule()
    def forget(self) -> None:
        self.scheduler.forget_cached()
        self.scheduler.check_integrity()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 8), drop=st.booleans(), read=st.booleans(), brought=st.integers(0, 3))
    def step(self, count: int, drop: bool, read: bool, brought: int) -> None:
        for _ in range(count):
            for source in (self.rig.disk, self.rig.remote):
                for which in reversed(range(len(source.jobs))):
                    source.deliver(brought, which)
            self.rig.before_step()
            schedule = self.scheduler.schedule()
            if drop:  # the model failed, say
                self.oracle.execute(schedule)
                schedule = self.scheduler.schedule()
            self.check_schedule(schedule)
            self.book(self.scheduler.update(schedule, self.oracle.execute(schedule)))
            self.rig.after_step()
            if read:
                self.read_events()

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 30), whole=st.booleans())
    def abort(self, which: int, whole: bool) -> None:
        victim = self.alive[which % len(self.alive)]
        self.abort_samples(victim, whole)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 30), whole=st.booleans())
    def abort_in_the_middle_of_a_step(self, which: int, whole: bool) -> None:
        self.rig.before_step()
        schedule = self.scheduler.schedule()
        sampled = self.oracle.execute(schedule)
        self.abort_samples(self.alive[which % len(self.alive)], whole)
        self.book(self.scheduler.update(schedule, sampled))
        self.rig.after_step()

    def read_events(self) -> None:
        first, events = self.pool.take_events()
        assert first == self.next_event
        self.next_event += len(events)
        for event in events:
            if isinstance(event, BlocksStored):
                self.known.update(event.block_ids)
            elif isinstance(event, CacheCleared):
                self.known.clear()
            else:
                assert self.known.issuperset(event.block_ids)
                self.known.difference_update(event.block_ids)
        assert len(self.known) == self.pool.num_cached
        assert all(self.pool.lookup([block_id]) for block_id in self.known)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.everyone())
        self.rig.filler.sweep()
        self.rig.check_integrity()
        for sequence in self.alive:
            self.check_identities(sequence)

    def everyone(self) -> list[Sequence]:
        """All unfinished sequences, those that are only computed among them."""
        return self.alive + self.rig.prefiller.prompts

    def abort_samples(self, victim: Sequence, whole: bool) -> None:
        expected = [s for s in self.alive if s is victim or (whole and s.request_id == victim.request_id)]
        gone = self.scheduler.abort(victim.request_id, None if whole else victim.sample_index)
        assert gone == expected
        for sequence in gone:
            assert sequence.finish_reason == "abort" and not sequence.block_table
            self.end(sequence)
        self.scheduler.check_integrity()

    def book(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            request = self.requests[sequence.request_id]
            output, reason, stop_token = expected_output(
                request, sequence.sample_index, vocab_size=VOCAB_SIZE, max_model_len=self.shape.max_model_len
            )
            rescued = list(request.token_ids())[sequence.num_prompt_tokens :]
            assert output[: len(rescued)] == rescued
            assert (list(sequence.output_token_ids), sequence.finish_reason, sequence.stop_token) == (
                output,
                reason,
                stop_token,
            )
            self.texts.append(list(sequence.tokens))
            self.end(sequence)
        self.scheduler.check_integrity()

    def end(self, sequence: Sequence) -> None:
        self.alive.remove(sequence)
        self.ended.append(sequence)

    def check_schedule(self, schedule: Schedule) -> None:
        shape, entries = self.shape, schedule.entries
        sending = [s for s in self.everyone() if s.block_table and s.num_computed_tokens == s.num_tokens]
        anyone = self.scheduler.num_in_line and not self.scheduler.num_filling and not sending
        assert entries or not anyone, "there is work and nothing is scheduled"
        assert sum(e.num_new_tokens for e in entries) == schedule.num_tokens <= shape.max_num_batched_tokens
        assert self.scheduler.num_running <= shape.max_num_seqs
        ones = [e.num_new_tokens == 1 for e in entries]
        assert ones == [i < schedule.num_decodes for i in range(len(entries))]
        scheduled = {id(e.sequence) for e in entries}
        assert len(scheduled) == len(entries) and not scheduled & {id(s) for s in schedule.preempted}
        computing = [s for s in self.everyone() if s.block_table and s not in sending]
        oldest = min(computing, key=lambda s: s.arrival, default=None)
        assert not entries or any(e.sequence is oldest for e in entries), "the oldest does not advance"
        if schedule.preempted:
            younger = min(s.arrival for s in schedule.preempted)
            assert all(e.sequence.arrival < younger for e in entries), "an older one was preempted"
        for sequence, count, _ in entries:
            if sequence.sampling.prompt_logprobs is not None and not sequence.num_sampled_tokens:
                assert sequence.num_cached_tokens == 0
            written = range(sequence.num_computed_tokens, sequence.num_computed_tokens + count)
            for block in {sequence.block_table[p // shape.block_size] for p in written}:
                holders = sum(block in s.block_table or block in s.held_blocks for s in self.everyone())
                assert holders == 1, "a shared block is written"
        ready = [s for s in self.alive if s.block_table and s.num_tokens - s.num_computed_tokens == 1]
        assert all(id(s) in scheduled for s in ready), "a decode was starved"

    def check_identities(self, sequence: Sequence) -> None:
        """What the pool finds for a running sequence's own chain holds the sequence's own keys."""
        block_size, expected = self.shape.block_size, digests(sequence.tokens)
        for number, block in enumerate(self.pool.lookup(sequence.block_ids)):
            start = number * block_size
            found = [self.oracle.cache[block * block_size + i] for i in range(block_size)]
            assert found == expected[start : start + block_size], "an identity names another content"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _, _, stream in self.asked.values():
            stream.num_free += 100
        for _ in range(self.budget_of_steps + 100):
            self.rig.now += 1.0
            self.rig.before_step()
            if not self.scheduler.has_work:
                break
            schedule = self.scheduler.schedule()
            self.check_schedule(schedule)
            self.book(self.scheduler.update(schedule, self.oracle.execute(schedule)))
            self.rig.after_step()
        assert not self.scheduler.has_work and not self.alive, "an admitted request does not finish"
        assert len(self.ended) == sum(request.sampling.n for request in self.requests.values())
        self.scheduler.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks
        assert not self.rig.disk.jobs and not self.rig.remote.jobs, "a source works for nobody"
        for prompt, first, stream in self.asked.values():
            self.check_sent(prompt, first, stream)
        self.read_events()

    def check_sent(self, prompt: list[int], first: int, stream: ListStream) -> None:
        """What another replica got is true, in order, and complete if it was told so."""
        assert stream.reason is not None, "a receiver was left without a word"
        packed = pack_tokens(prompt)
        chain = block_identities(ROOT, packed, self.shape.block_size)
        payloads = true_payloads(packed, self.shape.block_size)
        expected = list(zip(range(len(chain)), chain, payloads, strict=True))[first:]
        assert stream.blocks == expected[: len(stream.blocks)]
        assert stream.reason or len(stream.blocks) == len(expected)


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, database=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
