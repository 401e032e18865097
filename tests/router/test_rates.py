from __future__ import annotations

import random

import pytest

from headrace.router.rates import ClassRates, Rates

TOKEN_S, PAIR_S = 100e-6, 4e-9


def seconds(num_computed: int, num_tokens: int) -> float:
    return num_computed * TOKEN_S + num_computed * (num_tokens - num_computed / 2) * PAIR_S


def teach(rates: Rates, count: int, rng: random.Random, *, slower: float = 1.0, noise: float = 0.0) -> None:
    for _ in range(count):
        tokens = rng.choice([300, 2_000, 10_000, 50_000])
        computed = tokens - rng.choice([0, tokens // 2])
        taken = slower * seconds(computed, tokens) * max(0.5, rng.gauss(1.0, noise))
        rates.on_prefill(computed, tokens, rates.overhead_s + taken, alone=True)


def test_tells_attention_from_the_rest() -> None:
    rates = Rates(ClassRates())
    teach(rates, 60, random.Random(0))
    for computed, tokens in ((500, 500), (1_000, 100_000), (100_000, 100_000)):
        assert rates.prefill_s(computed, tokens) == pytest.approx(seconds(computed, tokens), rel=0.03)


def test_noise_averages_out() -> None:
    rates = Rates(ClassRates())
    teach(rates, 300, random.Random(1), noise=0.2)
    for computed, tokens in ((2_000, 2_000), (50_000, 50_000)):
        assert rates.prefill_s(computed, tokens) == pytest.approx(seconds(computed, tokens), rel=0.15)


def test_prompts_all_alike_tell_their_own_time() -> None:
    rates = Rates(ClassRates())
    for _ in range(30):
        rates.on_prefill(1_000, 1_000, 0.5 + rates.overhead_s, alone=True)
    assert rates.prefill_s(1_000, 1_000) == pytest.approx(0.5, rel=0.02)
    assert rates.prefill_rate == pytest.approx(2_000, rel=0.02)


def test_first_sample_replaces_the_guess() -> None:
    rates = Rates(ClassRates())
    rates.on_prefill(10_000, 10_000, 1.0, alone=False)
    assert rates.prefill_s(10_000, 10_000) == pytest.approx(1.0, rel=0.05)


def test_prompts_of_one_step_are_one_sample() -> None:
    """Four prompts of 500 tokens that come out together after 0.4 s: 5,000 tokens/s, not 1,250."""
    rates = Rates(ClassRates())
    for _ in range(40):
        rates.on_prefill(500, 500, 0.4, alone=False)
        for _ in range(3):
            rates.on_prefill(500, 500, 0.0, alone=False)
    assert rates.prefill_rate == pytest.approx(5_000, rel=0.05)


def test_a_single_stall_does_not_turn_the_estimate() -> None:
    rates = Rates(ClassRates())
    teach(rates, 60, random.Random(2))
    before = rates.prefill_s(2_000, 2_000)
    rates.on_prefill(2_000, 2_000, 1_000.0, alone=False)
    rates.on_prefill(2_000, 2_000, before, alone=False)
    assert rates.prefill_s(2_000, 2_000) < 1.5 * before


def test_a_lasting_change_is_learned() -> None:
    rates = Rates(ClassRates())
    teach(rates, 60, random.Random(3))
    teach(rates, 600, random.Random(4), slower=3.0)
    assert rates.prefill_s(2_000, 2_000) == pytest.approx(3 * seconds(2_000, 2_000), rel=0.2)


def test_next_to_nothing_to_compute_tells_the_overhead_and_no_rate() -> None:
    rates = Rates(ClassRates())
    guess = rates.prefill_s(1_000, 1_000)
    for _ in range(50):
        rates.on_prefill(1, 1_000, 0.03, alone=True)
        rates.on_prefill(1, 1_000, 5.0, alone=False)  # it queued
    assert rates.overhead_s == pytest.approx(0.03, rel=0.1)
    assert rates.prefill_s(1_000, 1_000) == guess


def test_a_class_learns_together_and_a_slow_member_differs() -> None:
    group = ClassRates()
    fast, slow, fresh = Rates(group), Rates(group), Rates(group)
    rng = random.Random(5)
    for _ in range(100):
        teach(fast, 1, rng)
        teach(slow, 1, rng, slower=2.0)
    ratio = slow.prefill_s(2_000, 2_000) / fast.prefill_s(2_000, 2_000)
    assert 1.5 < ratio < 2.1
    assert fast.prefill_s(2_000, 2_000) < fresh.prefill_s(2_000, 2_000) < slow.prefill_s(2_000, 2_000)


def test_a_new_member_shows_the_rate_of_its_class_be_it_all_attention() -> None:
    group = ClassRates()
    old, new = Rates(group), Rates(group)
    assert new.prefill_rate == pytest.approx(2_000)
    rng = random.Random(6)
    for _ in range(40):
        tokens = rng.choice([1_000, 1_100, 2_000])
        old.on_prefill(tokens, tokens, old.overhead_s + tokens * (1e-8 + 1e-6 * tokens / 2), alone=True)
    assert group.token_s < 1e-6
    assert new.prefill_rate == pytest.approx(old.prefill_rate, rel=0.5)


def test_decode_rate_is_that_of_one_stream() -> None:
    rates = Rates(ClassRates())
    for _ in range(60):
        rates.on_decode(4 * 101, 4, 10.0)
    assert rates.decode_rate == pytest.approx(10.0)
    assert rates.decode_s == pytest.approx(10.0, rel=0.05)
    assert rates.output_tokens == pytest.approx(101, rel=0.05)
    rates.on_decode(1, 1, 0.0)
    assert rates.decode_rate == pytest.approx(10.0), "a single token tells no rate"


def test_prior_of_a_mate_only_where_nothing_is_known() -> None:
    group = ClassRates()
    old, new = Rates(group), Rates(group)
    for _ in range(10):
        old.on_decode(200, 1, 2.0)
        old.on_prefill(1, 100, 0.5, alone=True)
    new.set_prior(old)
    assert (new.decode_s, new.overhead_s) == (old.decode_s, old.overhead_s)
    new.on_decode(100, 1, 50.0)
    known = new.decode_s
    new.set_prior(old)
    assert new.decode_s == known
