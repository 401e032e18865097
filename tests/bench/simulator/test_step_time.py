"""The step time model: what a schedule counts as, what a fit finds."""

from __future__ import annotations

import random

import pytest

from headrace.bench.simulator.step_time import StepTime, StepWork, fit
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.schedule import SchedulerConfig
from headrace.engine.scheduler import Scheduler
from headrace.kvcache.block_pool import BlockPool

TRUTH = StepTime(base=0.01, per_decode=2e-5, per_prefill=1e-4, per_context=1e-7, per_pair=5e-9)


def request(name: str, length: int, max_tokens: int, *, first: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(request_id=name, prompt=pack_tokens(range(first, first + length)), sampling=sampling)


def test_a_schedule_counts_decodes_prefills_context_and_pairs() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=100, block_size=4)
    scheduler = Scheduler(config, BlockPool(40, 4), bytes(32), ())
    scheduler.add(request("a", 6, 5))
    assert StepWork.of(scheduler.schedule()) == StepWork(0, 6, 0, 21)
    scheduler.update(scheduler.schedule(), [1])
    scheduler.add(request("b", 12, 5, first=50))
    # one token of a, which reads its 7; 7 of b's prompt
    work = StepWork.of(schedule := scheduler.schedule())
    assert work == StepWork(1, 7, 7, 28)
    scheduler.update(schedule, [1])
    # the last 5 of b's prompt see the 7 before them
    work = StepWork.of(scheduler.schedule())
    assert work == StepWork(1, 5, 8, 5 * 7 + 15)


def test_seconds_add_up_and_noise_is_repeatable() -> None:
    work = StepWork(10, 100, 5000, 1000)
    assert TRUTH.seconds(work) == pytest.approx(0.01 + 2e-4 + 1e-2 + 5e-4 + 5e-6)
    noisy = StepTime(base=1.0, noise=0.1)
    draws = [noisy.seconds(work, random.Random(3)) for _ in range(2)]
    assert draws[0] == draws[1] != 1.0
    rng = random.Random(4)
    mean = sum(noisy.seconds(work, rng) for _ in range(4000)) / 4000
    assert mean == pytest.approx(1.0, abs=0.01)


def measured(model: StepTime, noise: float = 0.0) -> list[tuple[StepWork, float]]:
    rng = random.Random(5)
    steps = []
    for _ in range(400):
        decodes, prefill = rng.randrange(64), rng.choice([0, 0, rng.randrange(1, 2048)])
        work = StepWork(
            decodes, prefill, decodes * rng.randrange(100, 20_000), prefill * rng.randrange(30_000)
        )
        steps.append((work, model.seconds(work) * rng.gauss(1.0, noise)))
    return steps


def test_a_fit_finds_the_coefficients_that_made_the_steps() -> None:
    found = fit(measured(TRUTH))
    for name in ("base", "per_decode", "per_prefill", "per_context", "per_pair"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6)
    assert found.noise == pytest.approx(0.0, abs=1e-9)


def test_a_fit_of_noisy_steps_is_near_and_tells_the_noise() -> None:
    found = fit(measured(TRUTH, noise=0.05))
    assert found.per_prefill == pytest.approx(TRUTH.per_prefill, rel=0.05)
    assert found.noise == pytest.approx(0.05, rel=0.2)


def test_terms_that_do_not_occur_or_would_be_negative_are_zero() -> None:
    steps = [(StepWork(n, 0, 0, 0), 0.01 + 1e-3 * n) for n in range(1, 20)]
    found = fit(steps)
    assert found.per_decode == pytest.approx(1e-3) and found.per_prefill == found.per_pair == 0.0
    falling = [(StepWork(n, 0, 100 - n, 0), 0.01 + 1e-3 * n) for n in range(1, 20)]
    assert all(getattr(fit(falling), name) >= 0.0 for name in ("base", "per_decode", "per_context"))


def test_too_few_steps_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        fit([(StepWork(1, 0, 0, 0), 0.01)])
