"""The prefix index against a model that is plainly right: a set of keys for each replica."""

from __future__ import annotations

import os
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.errors import EngineError
from headrace.router.prefix_index import PrefixIndex, keys_of

CHAINS = [[10 * chain + i for i in range(1, 7)] for chain in range(4)]
KEYS = [key for chain in CHAINS for key in chain]


def test_keys_are_the_same_wherever_an_identity_stands() -> None:
    ids = [os.urandom(32) for _ in range(5)]
    together = keys_of(b"".join(ids))
    assert together == [keys_of(one)[0] for one in ids]
    assert len(set(together)) == 5
    assert keys_of(b"") == []


def test_half_an_identity_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="32 bytes each, got 40"):
        keys_of(bytes(40))


def test_match_counts_the_prefix_alone() -> None:
    index = PrefixIndex(100)
    one, two, three = index.add_slot(), index.add_slot(), index.add_slot()
    index.store(one, [1, 2, 3, 4])
    index.store(two, [1, 2])
    index.store(three, [2, 3, 4])  # not the first: useless
    assert index.match([1, 2, 3, 4, 5]) == [4, 2, 0]
    assert index.match([2, 3]) == [2, 1, 2]
    assert index.match([9]) == [0, 0, 0]
    assert index.match([]) == [0, 0, 0]


def test_a_hole_ends_the_match() -> None:
    index = PrefixIndex(100)
    slot = index.add_slot()
    index.store(slot, [1, 2, 3])
    index.remove(slot, [2])
    assert index.match([1, 2, 3]) == [1]


def test_long_prompts_on_many_replicas() -> None:
    index = PrefixIndex(10_000)
    keys = keys_of(os.urandom(32 * 6250))
    for i in range(16):
        index.store(index.add_slot(), keys[: 6250 - i])
    assert index.match(keys) == [6250 - i for i in range(16)]


def test_claims_count_until_all_who_made_them_are_gone() -> None:
    index = PrefixIndex(100)
    one, two = index.add_slot(), index.add_slot()
    index.store(one, [1])
    index.claim(one, [2, 3])
    index.claim(one, [2])
    assert index.match([1, 2, 3]) == [3, 0]
    index.unclaim(one, [2, 3])
    assert index.match([1, 2, 3]) == [2, 0]
    index.unclaim(one, [2])
    assert index.match([1, 2, 3]) == [1, 0]
    index.claim(two, [1])
    index.drop_slot(two)
    assert index.match([1]) == [1, 0]
    index.check_integrity()


def test_dropped_slot_is_given_again_and_knows_nothing() -> None:
    index = PrefixIndex(100)
    slot = index.add_slot()
    index.store(slot, [1, 2])
    index.drop_slot(slot)
    assert index.add_slot() == slot
    assert index.count(slot) == 0
    assert index.match([1]) == [0]
    index.check_integrity({slot: set()})


def test_bound_forgets_the_oldest() -> None:
    index = PrefixIndex(32)
    slot = index.add_slot()
    for key in range(100):
        index.store(slot, [key])
        assert index.count(slot) <= 32
    assert index.match([99]) == [1]
    assert index.match([0]) == [0]
    index.check_integrity()


def test_guesses_are_forgotten_as_an_engine_would() -> None:
    """The last blocks of the longest unused request go first."""
    index = PrefixIndex(1000)
    slot = index.add_slot()
    index.assume(slot, [1, 2, 3], 0.0, num_blocks=6)
    index.assume(slot, [11, 12, 13], 1.0, num_blocks=6)
    index.assume(slot, [1, 2], 2.0, num_blocks=6)  # used again
    index.assume(slot, [21, 22], 3.0, num_blocks=6)
    assert index.match([1, 2, 3]) == [2], "3 was not used again"
    assert index.match([11, 12, 13]) == [2], "13 was the next to go"
    assert index.match([21, 22]) == [2]
    assert index.count(slot) == 6


def test_output_takes_room_too() -> None:
    index = PrefixIndex(1000)
    slot = index.add_slot()
    index.assume(slot, [1, 2, 3], 0.0, num_blocks=6)
    index.assume(slot, [11], 1.0, num_blocks=6, num_other=4)
    assert index.match([1, 2, 3]) == [1]
    assert index.match([11]) == [1]
    index.check_integrity()


def test_more_than_the_whole_cache_keeps_the_beginning() -> None:
    index = PrefixIndex(1000)
    slot = index.add_slot()
    index.assume(slot, list(range(1, 11)), 0.0, num_blocks=4)
    assert index.match(list(range(1, 11))) == [4]


def test_guesses_age() -> None:
    index = PrefixIndex(1000)
    slot = index.add_slot()
    index.assume(slot, [1, 2], 0.0)
    index.assume(slot, [11], 5.0)
    index.assume(slot, [1], 6.0)
    index.expire(slot, 5.0)
    assert index.match([1, 2]) == [1]
    assert index.match([11]) == [1]
    index.expire(slot, 100.0)
    assert index.count(slot) == 0
    index.check_integrity()


class IndexMachine(RuleBasedStateMachine):
    """Random events of three replicas; the third has no events and is guessed at."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1000)
        self.slots = [self.index.add_slot() for _ in range(3)]
        self.exact: list[set[int]] = [set(), set()]
        self.guessed: OrderedDict[int, None] = OrderedDict()
        self.claims: list[tuple[int, list[int]]] = []
        self.now = 0.0

    @rule(which=st.integers(0, 1), chain=st.sampled_from(CHAINS), length=st.integers(1, 6))
    def store(self, which: int, chain: list[int], length: int) -> None:
        self.index.store(self.slots[which], chain[:length])
        self.exact[which] |= set(chain[:length])

    @rule(which=st.integers(0, 1), keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def remove(self, which: int, keys: list[int]) -> None:
        self.index.remove(self.slots[which], keys)
        self.exact[which] -= set(keys)

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        self.index.clear(self.slots[which])
        self.exact[which].clear()

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.index.drop_slot(self.slots[which])
        self.slots[which] = self.index.add_slot()
        self.exact[which].clear()
        self.claims = [claim for claim in self.claims if claim[0] != which]

    @rule(which=st.integers(0, 1), chain=st.sampled_from(CHAINS), start=st.integers(0, 5))
    def claim(self, which: int, chain: list[int], start: int) -> None:
        self.index.claim(self.slots[which], chain[start:])
        self.claims.append((which, chain[start:]))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        which, keys = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        self.index.unclaim(self.slots[which], keys)

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(0, 6))
    def assume(self, chain: list[int], length: int) -> None:
        self.now += 1.0
        self.index.assume(self.slots[2], chain[:length], self.now, num_blocks=10)
        for key in reversed(chain[:length]):
            self.guessed.pop(key, None)
            self.guessed[key] = None
        while len(self.guessed) > 10:
            self.guessed.popitem(last=False)

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        held = [set(keys) for keys in self.exact] + [set(self.guessed)]
        expected = dict(zip(self.slots, [set(keys) for keys in held], strict=True))
        self.index.check_integrity(expected)
        for which, keys in self.claims:
            held[which] |= set(keys)
        for chain in CHAINS:
            depths = self.index.match(chain)
            for which, slot in enumerate(self.slots):
                depth = next((i for i, key in enumerate(chain) if key not in held[which]), len(chain))
                assert depths[slot] == depth


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
