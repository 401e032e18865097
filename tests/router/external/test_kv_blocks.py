"""Another engine's blocks in our identities, for equal and unequal block sizes."""

from __future__ import annotations

import random
from array import array

import pytest

from headrace.core.identity import block_identities
from headrace.core.messages import BlocksRemoved, BlocksStored
from headrace.router.external.kv_blocks import BlockTranslator

ROOT = b"r" * 32


def ids(tokens: list[int], size: int) -> list[bytes]:
    return block_identities(ROOT, array("I", tokens), size)


def apply(held: set[bytes], events: list) -> set[bytes]:
    """What a listener knows after these events; a block may only be stored behind one that is there."""
    for event in events:
        if isinstance(event, BlocksStored):
            held.update(event.block_ids)
        elif isinstance(event, BlocksRemoved):
            assert held.issuperset(event.block_ids), "removed once only"
            held.difference_update(event.block_ids)
    return held


@pytest.mark.parametrize(("theirs", "ours"), [(16, 16), (16, 32), (128, 32), (1, 16), (24, 16), (16, 24)])
def test_a_prefix_is_told_in_our_blocks(theirs, ours):
    tokens = list(range(7 * 48))
    translator = BlockTranslator(ROOT, ours)
    num = len(tokens) // theirs
    keys = list(range(num))
    held = apply(set(), translator.stored(keys[: num // 2], None, tokens[: num // 2 * theirs], theirs))
    assert held == set(ids(tokens[: num // 2 * theirs], ours))
    more = tokens[num // 2 * theirs : num * theirs]
    held = apply(held, translator.stored(keys[num // 2 :], keys[num // 2 - 1], more, theirs))
    assert held == set(ids(tokens[: num * theirs], ours))
    assert len(translator) == len(held)
    held = apply(held, translator.removed(list(reversed(keys))))
    assert not held and not len(translator)
    assert not translator._theirs and not translator._ours, "nothing is kept of what is gone"


def test_events_chain_from_their_parent():
    tokens = list(range(64))
    translator = BlockTranslator(ROOT, 16)
    (event,) = translator.stored(["a", "b"], None, tokens[:32], 16)
    assert (event.block_ids, event.parent) == (ids(tokens[:32], 16), ROOT)
    (event,) = translator.stored(["c"], "b", tokens[32:48], 16)
    assert event.parent == ids(tokens, 16)[1]


def test_a_block_held_twice_is_there_until_both_are_gone():
    translator = BlockTranslator(ROOT, 4)
    assert translator.stored([1], None, [1, 2, 3, 4], 4)
    assert not translator.stored([1], None, [1, 2, 3, 4], 4)
    assert not translator.removed([1])
    assert translator.removed([1]) == [BlocksRemoved(ids([1, 2, 3, 4], 4))]
    assert not translator.removed([1])


def test_half_of_our_block_gone_is_all_of_it_gone_and_comes_back_with_it():
    tokens = list(range(32))
    translator = BlockTranslator(ROOT, 32)
    assert not translator.stored(["a"], None, tokens[:16], 16)
    assert apply(set(), translator.stored(["b"], "a", tokens[16:], 16)) == set(ids(tokens, 32))
    assert translator.removed(["a"]) == [BlocksRemoved(ids(tokens, 32))]
    assert not translator.removed(["b"])
    assert not translator.stored(["a"], None, tokens[:16], 16)
    assert apply(set(), translator.stored(["b"], "a", tokens[16:], 16)) == set(ids(tokens, 32))


def test_the_first_half_comes_back_while_the_second_stayed():
    tokens = list(range(32))
    translator = BlockTranslator(ROOT, 32)
    translator.stored(["a", "b"], None, tokens, 16)
    translator.removed(["a"])
    assert apply(set(), translator.stored(["a"], None, tokens[:16], 16)) == set(ids(tokens, 32))


def test_a_block_behind_one_whose_beginning_is_gone():
    translator = BlockTranslator(ROOT, 32)
    tokens = list(range(32))
    translator.stored(["a", "b", "c"], None, tokens[:24], 8)
    translator.removed(["a"])
    assert not translator.stored(["d"], "c", tokens[24:], 8), "its first quarter is not there"
    assert not translator.removed(["b", "c", "d"])
    assert not translator._theirs and not translator._ours


def test_orphans_and_odd_lengths_are_counted_and_left_out():
    translator = BlockTranslator(ROOT, 16)
    assert not translator.stored(["x"], "unknown", list(range(16)), 16)
    assert not translator.stored(["y"], None, list(range(15)), 16)
    assert translator.num_orphans == 2
    assert not translator.removed(["x", "y", "never"])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("theirs", "ours"), [(16, 16), (8, 32), (32, 8), (12, 8)])
def test_any_sequence_leaves_what_their_blocks_cover(seed, theirs, ours):
    """A cache of chains whose blocks come and go in any order an engine may have: children before parents."""
    rng = random.Random(seed)
    chains = [[rng.randrange(3) for _ in range(10 * theirs)] for _ in range(4)]
    for chain in chains[1:]:
        cut = rng.randrange(10) * theirs
        chain[:cut] = chains[0][:cut]
    translator = BlockTranslator(ROOT, ours)
    there: dict[tuple[int, ...], int] = {}
    held: set[bytes] = set()
    for _ in range(120):
        chain = rng.choice(chains)
        prefixes = [tuple(chain[: n * theirs]) for n in range(1, 11)]
        num = next((n for n, prefix in enumerate(prefixes) if not there.get(prefix)), 10)
        if rng.random() < 0.6:
            upto = rng.randint(num, 10)
            if upto > num:
                new = prefixes[num:upto]
                parent = prefixes[num - 1] if num else None
                tokens = chain[num * theirs : upto * theirs]
                held = apply(held, translator.stored(new, parent, tokens, theirs))
                for prefix in new:
                    there[prefix] = there.get(prefix, 0) + 1
        elif there:
            # what is freed last in a chain is evicted first
            leaves = [
                prefix
                for prefix in there
                if not any(other[: len(prefix)] == prefix and len(other) > len(prefix) for other in there)
            ]
            gone = rng.choice(leaves)
            held = apply(held, translator.removed([gone]))
            there[gone] -= 1
            if not there[gone]:
                del there[gone]
        expected = {identity for prefix in there for identity in ids(list(prefix), ours)}
        assert held == expected
    told = {identity for event in translator.snapshot() for identity in event.block_ids}
    assert told == held
