"""Brings a pack to running replicas without dropping a token, or takes it back.

    canary   prepare ─► score recorded tokens with and without it ─► flip ─► compare live steps ─► score again
    others   prepare ─► score a few ─► flip                      one after the other
    all      retire what ran before

Whatever goes wrong before the canary has flipped leaves everything as it was; after that, every replica that
has flipped flips back. A flip happens between two steps: what runs goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.core.control import PACK_REFUSED, PACK_ROLLED_BACK
from headrace.core.errors import HeadraceError, PackError
from headrace.core.messages import Hello, Score, Scored, StepTimes
from headrace.fleet.canary import SLOWER, agreement, noise_floor, slowdown
from headrace.fleet.local import LocalReplica
from headrace.fleet.packs import Pack
from headrace.fleet.replica_link import ReplicaLink

# Live steps are compared once there are so many on both sides, at the latest after LIVE_S; at once where
# no step is made for IDLE_S.
LIVE_STEPS = 64
LIVE_S = 15.0
IDLE_S = 1.0
# Spells with the pack before it is called slower, with one more without it. That those four are by chance
# the slowest of the nine is one case in 126.
LIVE_SPELLS = 4
POLL_S = 0.05
# Tokens to score: enough to see one wrong position in a hundred.
NUM_POSITIONS = 1600
LONG, SHORT = 192, 96
AGAIN = slice(1, 4)  # of the sequences are scored once more after the flip, and on the other replicas
GROUPS = (1, 2, 5, 8)
CHUNK = 64
NUM_TOP = 8


class Rollout:
    """One pack on its way to the replicas of one model."""

    def __init__(
        self, replicas: Sequence[LocalReplica], pack: Pack, before: Pack, report: Callable[[str], None]
    ) -> None:
        """``before`` is what they run now, and what their processes start with."""
        self._replicas = list(replicas)
        self._pack = pack
        self._before = before
        self._report = report
        self._links: list[ReplicaLink] = []
        self._ran: dict[str, str] = {}  # pack id by replica
        self._flipped: list[tuple[LocalReplica, ReplicaLink]] = []
        # what the canary scored, what it made of it before the flip, and its noise floor
        self._tokens: list[bytes] = []
        self._reference = Scored("", [], [])
        self._floor = 0.0

    async def run(self) -> None:
        """Raises PackError whose code says what became of it; the reason is in its message."""
        async with self._connected():
            await self._canary()
            await self._follow(self._links[0])

    async def run_unseen(self) -> None:
        """Without a canary: back to what is known."""
        async with self._connected():
            await self._follow(None)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        try:
            for replica in self._replicas:
                link = ReplicaLink(replica.spec.replica_id, replica.spec.socket)
                self._links.append(link)
                await link.connect()
                self._ran[link.replica_id] = (await link.step_times()).pack_id
            yield
        except HeadraceError as error:
            if not self._flipped:
                await self._retire(self._pack.pack_id)
                code = error.code if error.code == PACK_ROLLED_BACK else PACK_REFUSED
                raise PackError(error.message, hint=error.hint, code=code) from error
            self._report(f"taken back: {error.message}")
            await self._take_back()
            raise PackError(error.message, hint=error.hint, code=PACK_ROLLED_BACK) from error
        finally:
            for link in self._links:
                link.close()

    # The canary

    async def _canary(self) -> None:
        replica, link = self._replicas[0], self._links[0]
        old, new = self._ran[link.replica_id], self._pack.pack_id
        await self._prepare(link)
        tokens, groups, words = sample(await link.recorded(), link.hello)
        self._report(f"{link.replica_id}, the canary, scores {words} with {self._pack} and with {_name(old)}")
        decoded, tried = await link.score(Score(tokens, groups, [old, new], 1, NUM_TOP))
        (chunked,) = await link.score(Score(tokens, groups, [old], CHUNK, NUM_TOP))
        self._tokens, self._reference = tokens, decoded
        self._floor = noise_floor(decoded, chunked)
        self._compare(link, decoded, tried)
        await self._check_scored_steps(link, tokens, groups, decoded, tried)
        live = await link.step_times()
        await self._flip(replica, link)
        await self._check_live_steps(link, live)
        # once more, for what shows only after a while
        await self._compare_some(link)
        replica.start_with(self._pack.setting)

    def _compare(self, link: ReplicaLink, before: Scored, after: Scored) -> None:
        found = agreement(before, after, self._floor)
        self._report(f"{link.replica_id}: {found}")
        if not found.holds:
            raise PackError(f"{self._pack} is wrong on {link.replica_id}: {found}", code=PACK_ROLLED_BACK)

    async def _compare_some(self, link: ReplicaLink) -> None:
        """A few of the canary's sequences, compared with what the canary made of them before."""
        (again,) = await link.score(
            Score(self._tokens[AGAIN], list(GROUPS), [self._pack.pack_id], 1, NUM_TOP)
        )
        reference = Scored(self._reference.pack_id, self._reference.sequences[AGAIN], [])
        self._compare(link, reference, again)

    async def _check_scored_steps(
        self, link: ReplicaLink, tokens: list[bytes], groups: list[int], decoded: Scored, tried: Scored
    ) -> None:
        ratio, count = slowdown(decoded.times, tried.times)
        if ratio > SLOWER:  # both took turns; once more all the same, as it decides
            decoded, tried = await link.score(
                Score(tokens, groups, [decoded.pack_id, tried.pack_id], 1, NUM_TOP)
            )
            ratio = min(ratio, slowdown(decoded.times, tried.times)[0])
        words = f"its steps take {ratio:.3f} x as long, by {count} scored ones"
        self._report(f"{link.replica_id}: {words}")
        if ratio > SLOWER:
            raise PackError(f"{self._pack} is slower on {link.replica_id}: {words}", code=PACK_ROLLED_BACK)

    async def _check_live_steps(self, link: ReplicaLink, before: StepTimes) -> None:
        """Slower is what is slower than every spell without it, before, between and after: contexts grow,
        callers come and go, neighbours are busy for a while."""
        without, having = [before], [await self._watch(link, before)]
        if not slowdown(before.times, having[0].times)[1]:
            self._report(f"{link.replica_id}: too few live steps to compare")
            return
        while (ratio := _least_slowdown(without, having)) > SLOWER and len(without) <= LIVE_SPELLS:
            longer = without if len(without) == len(having) else having
            await link.use((before if longer is without else having[0]).pack_id)
            longer.append(await self._watch(link, before))
        words = f"live steps take {ratio:.3f} x as long, by {len(having)} spells with it"
        self._report(f"{link.replica_id}: {words}")
        if ratio > SLOWER:
            raise PackError(f"{self._pack} is slower on {link.replica_id}: {words}", code=PACK_ROLLED_BACK)
        if len(without) > len(having):  # the last spell was one without it
            await link.use(self._pack.pack_id)

    async def _watch(self, link: ReplicaLink, before: StepTimes) -> StepTimes:
        """Step times since the last flip, once enough of them compare with ``before`` or no more come."""
        loop = asyncio.get_running_loop()
        deadline, last, last_at = loop.time() + LIVE_S, -1, loop.time()
        while True:
            times = await link.step_times()
            now = loop.time()
            if times.num_steps != last:
                last, last_at = times.num_steps, now
            enough = slowdown(before.times, times.times)[1] >= LIVE_STEPS
            if enough or now >= deadline or now - last_at >= IDLE_S:
                return times
            await asyncio.sleep(POLL_S)

    # All replicas

    async def _prepare(self, link: ReplicaLink) -> None:
        if not self._pack.pack_id or self._ran[link.replica_id] == self._pack.pack_id:
            return
        self._report(f"{link.replica_id} prepares {self._pack}")
        ready = await link.prepare(self._pack.pack_id, self._pack.folder)
        self._report(f"{link.replica_id} has prepared it in {ready.seconds:.1f} s")

    async def _flip(self, replica: LocalReplica, link: ReplicaLink) -> None:
        self._flipped.append((replica, link))
        await link.use(self._pack.pack_id)
        self._report(f"{link.replica_id} runs {self._pack}")

    async def _follow(self, canary: ReplicaLink | None) -> None:
        """Every replica but the canary, then what ran before is retired everywhere."""
        for replica, link in zip(self._replicas, self._links, strict=True):
            if link is canary:
                continue
            await self._prepare(link)
            if canary is not None:
                await self._compare_some(link)
            replica.start_with(self._pack.setting)  # first: one that dies in between comes back with it
            await self._flip(replica, link)
        for link in self._links:
            if self._ran[link.replica_id] != self._pack.pack_id:
                with contextlib.suppress(HeadraceError):  # one that has died since holds nothing
                    await link.retire(self._ran[link.replica_id])

    async def _take_back(self) -> None:
        """One that is gone comes back with what ran before, by its spec."""
        for replica, _ in self._flipped:
            replica.start_with(self._before.setting)
        for replica, link in self._flipped:
            with contextlib.suppress(HeadraceError):
                await link.use(self._ran[link.replica_id])
                self._report(f"{replica.spec.replica_id} runs {_name(self._ran[link.replica_id])} again")
        await self._retire(self._pack.pack_id)

    async def _retire(self, pack_id: str) -> None:
        for link in self._links:
            if self._ran.get(link.replica_id, pack_id) != pack_id:
                with contextlib.suppress(HeadraceError):
                    await link.retire(pack_id)


def _least_slowdown(without: Sequence[StepTimes], having: Sequence[StepTimes]) -> float:
    """Of all pairs that compare."""
    pairs = [slowdown(one.times, other.times) for one in without for other in having]
    return min((ratio for ratio, count in pairs if count), default=1.0)


def sample(recorded: Sequence[bytes], hello: Hello) -> tuple[list[bytes], list[int], str]:
    """Sequences to score, how they are grouped, and what they are in words: what was served lately, and
    tokens drawn at random where that is too little."""
    limit = 4 * hello.max_model_len
    chosen: list[bytes] = []
    num_positions = num_recorded = 0
    for packed in sorted(recorded, key=len, reverse=True):
        if num_positions >= NUM_POSITIONS:
            break
        part = packed[: min(limit, 4 * (SHORT if chosen else LONG))]
        chosen.append(part)
        num_positions += len(part) // 4 - 1
        num_recorded += 1
    draw = random.Random(0)
    while num_positions < NUM_POSITIONS and len(chosen) < 64:
        length = min(hello.max_model_len, SHORT if chosen else LONG)
        chosen.append(array("I", [draw.randrange(hello.vocab_size) for _ in range(length)]).tobytes())
        num_positions += length - 1
    groups: list[int] = []
    while sum(groups) < len(chosen):
        groups.append(GROUPS[min(len(groups), len(GROUPS) - 1)])
    drawn = len(chosen) - num_recorded
    parts = [f"{num_recorded} recorded"] * bool(num_recorded) + [f"{drawn} random"] * bool(drawn)
    return chosen, groups, f"{num_positions} tokens of {' and '.join(parts)} sequences"


def _name(pack_id: str) -> str:
    return str(Pack(pack_id))
