"""The sampler against its definition, row by row and in any company."""

from __future__ import annotations

import math
import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.rng import uniforms
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Sequence
from tests.engine import oracle

EOS = [2, 5]
VOCAB = 3000  # more than the sampler's first look at the best candidates


def make_sequence(prompt: list[int], output: list[int], sample_index: int = 0, **params: Any) -> Sequence:
    sampling = SamplingParams(**{"seed": 0, "max_tokens": None, **params})
    request = Request(request_id="r", prompt=pack_tokens(prompt), sampling=sampling)
    sequence = Sequence(request, sample_index, array("I", prompt), max_length=10_000, arrival=0)
    sequence.tokens.extend(output)
    return sequence


def random_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1024},
    {"top_k": 1500},
    {"top_k": VOCAB + 5},
    {"top_p": 0.2},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"top_p": 0.97, "temperature": 20.0},
    {"top_k": 40, "top_p": 0.7, "temperature": 0.8},
    {"top_k": 2000, "top_p": 0.99, "temperature": 10.0},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_p": 0.8, "top_k": 50, "temperature": 1.5},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.7, "top_p": 0.9},
    {"logit_bias": {0: 8.0, 17: 9.5, 2999: -3.0}},
    {"logit_bias": {2: 100.0}, "min_tokens": 50, "stop_token_ids": [7, 8]},
    {"logit_bias": {2: 100.0}, "min_tokens": 50, "ignore_eos": True},
    {"logit_bias": {2: 100.0}, "min_tokens": 3},
]


@pytest.mark.parametrize("params", PARAMETERS, ids=str)
@pytest.mark.parametrize("temperature", ["as given", "greedy"])
def test_each_parameter_follows_its_definition(params: dict[str, Any], temperature: str) -> None:
    rng = random.Random(1)
    params = {**params, "temperature": 0.0} if temperature == "greedy" else params
    logits = random_logits(24)
    sequences = []
    for row in range(len(logits)):
        best = logits[row].topk(40).indices.tolist()
        output = rng.choices(best, k=row % 12)
        sequences.append(make_sequence([*rng.choices(best, k=5), 1], output, row % 3, seed=row, **params))
    sampled = Sampler(EOS).sample(logits, sequences)
    assert sampled.invalid == []
    for row, (sequence, token) in enumerate(zip(sequences, sampled.token_ids, strict=True)):
        sampling = sequence.sampling
        prompt, output = sequence.tokens[:6].tolist(), sequence.tokens[6:].tolist()
        values = oracle.processed(logits[row].double().numpy(), sampling, prompt, output, EOS)
        if sampling.temperature == 0:
            assert token == int(values.argmax())
            continue
        probs = oracle.distribution(values, sampling)
        uniform = uniforms(row, row % 3, len(output), 1)[0]
        assert probs[token] > 0
        # float32 may move a border of the cumulative distribution by its rounding, not more
        low, high = np.cumsum(probs)[token] - probs[token], np.cumsum(probs)[token]
        assert low - 1e-5 <= uniform <= high + 1e-5


def test_a_row_alone_and_in_company_is_the_same() -> None:
    logits = random_logits(3 * len(PARAMETERS), seed=5)
    everybody = [{**p, "temperature": t} if t else p for p in PARAMETERS for t in (None, 0.0, 1.7)]

    def fresh(row: int) -> Sequence:
        return make_sequence([3, 9, row], [9, row % 7], seed=row, **everybody[row])

    together = Sampler(EOS).sample(logits, [fresh(row) for row in range(len(logits))]).token_ids
    alone = [Sampler(EOS).sample(logits[[row]], [fresh(row)]).token_ids[0] for row in range(len(logits))]
    assert together == alone
    order = list(range(len(logits)))
    random.Random(0).shuffle(order)
    shuffled = Sampler(EOS).sample(logits[order], [fresh(row) for row in order]).token_ids
    assert shuffled == [together[row] for row in order]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 30}, {"top_p": 0.9}, {"top_p": 0.98, "temperature": 9.0}, {"min_p": 0.1}],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Pearson's chi-squared over 5,000 draws with fixed seeds."""
    draws, batch = 5_000, 500
    logits = random_logits(1, 1500, seed=2, scale=2.0)
    expected = oracle.distribution(logits[0].double().numpy(), SamplingParams(**params)) * draws
    seen = np.zeros(1500)
    sampler = Sampler(EOS)
    for first in range(0, draws, batch):
        rows = [make_sequence([1], [], seed=first + i, **params) for i in range(batch)]
        np.add.at(seen, sampler.sample(logits.expand(batch, -1), rows).token_ids, 1)
    assert seen[expected == 0].sum() == 0
    big = expected >= 5
    pooled = [(seen[big], expected[big]), (seen[~big].sum(keepdims=True), expected[~big].sum(keepdims=True))]
    observed, wanted = (np.concatenate(column) for column in zip(*pooled, strict=True))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_output_positions_differ_and_repeat() -> None:
    """The number drawn depends on the position in the output, and comes back after a preemption."""
    logits = torch.zeros(1, 500)
    sequence = make_sequence([1, 2], [], seed=3)
    tokens = []
    for _ in range(20):
        tokens.append(Sampler(EOS).sample(logits, [sequence]).token_ids[0])
        sequence.tokens.append(tokens[-1])
    assert len(set(tokens)) > 15
    assert tokens == [int(500 * u) for u in uniforms(3, 0, 0, 20)]
    for length in (0, 7, 19):
        again = make_sequence([1, 2], tokens[:length], seed=3)
        assert Sampler(EOS).sample(logits, [again]).token_ids == [tokens[length]]


def test_tied_logits_stay_in_together() -> None:
    logits = torch.full((1, 2000), -50.0)
    logits[0, 10:1510] = 1.0  # tied beyond the first candidates
    tokens = [
        Sampler(EOS)
        .sample(logits.clone(), [make_sequence([1], [], seed=seed, top_k=4, top_p=0.5)])
        .token_ids[0]
        for seed in range(300)
    ]
    assert 10 <= min(tokens) < 60 and 1460 < max(tokens) < 1510


def test_rows_with_nan_are_named_and_others_are_not_touched() -> None:
    logits = random_logits(8)
    clean = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"temperature": 0.0, "presence_penalty": 1.0}]
    sequences = [make_sequence([1, 4], [], seed=7, **clean[row % 4]) for row in range(8)]
    expected = Sampler(EOS).sample(logits, sequences).token_ids
    broken = logits.clone()
    broken[4:, 77] = math.nan
    sampled = Sampler(EOS).sample(broken, sequences)
    assert sampled.invalid == [5, 4, 6, 7] or sorted(sampled.invalid) == [4, 5, 6, 7]
    assert sampled.token_ids[:4] == expected[:4]


def test_a_row_without_an_allowed_token_is_invalid() -> None:
    everything = make_sequence([0], [], min_tokens=2, stop_token_ids=list(range(30)))
    greedy = make_sequence([0], [], min_tokens=2, stop_token_ids=list(range(30)), temperature=0.0)
    assert sorted(Sampler(EOS).sample(torch.zeros(2, 30), [everything, greedy]).invalid) == [0, 1]


def test_greedy_ties_go_to_the_first_token() -> None:
    logits = torch.zeros(2, 40)
    logits[:, [11, 12, 30]] = 4.0
    rows = [
        make_sequence([1], [], temperature=0.0),
        make_sequence([1], [], temperature=0.0, logit_bias={3: 1.0}),
    ]
    assert Sampler(EOS).sample(logits, rows).token_ids == [11, 11]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(4, 200)
    rows = [
        make_sequence([1], [], temperature=0.0, logprobs=3),
        make_sequence([1], [], temperature=0.0),
        make_sequence([1], [9], temperature=2.0, top_k=5, presence_penalty=2.0, logprobs=0, seed=3),
        make_sequence([1], [], logit_bias={150: 100.0}, logprobs=20),
    ]
    sampled = Sampler(EOS).sample(logits, rows)
    assert sorted(sampled.logprobs) == [0, 2, 3]
    reference = logits.double().log_softmax(-1)
    for row, found in sampled.logprobs.items():
        token = sampled.token_ids[row]
        assert found.token_id == token
        assert found.logprob == pytest.approx(reference[row, token].item(), abs=1e-5)
        assert found.rank == 1 + int((reference[row] > reference[row, token]).sum())
        best = reference[row].topk(rows[row].sampling.logprobs or 0)
        assert [i for i, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert sampled.token_ids[3] == 150 and sampled.logprobs[3].rank > 1


def test_inputs_are_left_as_they_were() -> None:
    logits = random_logits(len(PARAMETERS))
    before = logits.clone()
    rows = [make_sequence([1, 2], [3], seed=1, **params) for params in PARAMETERS]
    Sampler(EOS).sample(logits, rows)
    assert torch.equal(logits, before)
