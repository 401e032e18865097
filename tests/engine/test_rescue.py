"""A stream that another engine goes on with: token for token what the first would have given, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.request import Request, pack_tokens
from headrace.engine.engine import Engine
from tests.engine.harness import Result, make_engine, make_request, run

PROMPT = [11, 48, 85, 122, 159, 196, 233, 270, 9, 46, 83, 120, 157]
LENGTH = 24
EOS = 1
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "truncated": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logprobs": 0,
    },
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 7: 4.0}},
    "up to the context": {"temperature": 1.0, "max_tokens": None},
    # end-of-text is likely at every position, forbidden up to one and taken soon after
    "min_tokens": {"temperature": 1.0, "ignore_eos": False, "min_tokens": 10, "logit_bias": {EOS: 6.0}},
    "n": {"temperature": 1.0, "n": 3, "logprobs": 1},
    "n that ends apart": {"temperature": 1.0, "n": 4, "ignore_eos": False, "logit_bias": {EOS: 3.0}},
}


def rest_of(request: Request, sample: int, tokens: list[int]) -> Request:
    """What a gateway sends to another replica for one sample whose ``tokens`` have arrived."""
    return msgspec.structs.replace(
        request,
        prompt=request.prompt + pack_tokens(tokens),
        num_output_tokens=len(tokens),
        sample_index=sample,
        sampling=msgspec.structs.replace(request.sampling, n=1, prompt_logprobs=None),
    )


def same(one: Result, other: Result) -> None:
    assert one.tokens == other.tokens
    assert (one.finish_reason, one.stop_token) == (other.finish_reason, other.stop_token)
    assert len(one.logprobs) == len(other.logprobs)
    for mine, yours in zip(one.logprobs, other.logprobs, strict=True):
        assert (mine.token_id, mine.rank) == (yours.token_id, yours.rank)
        # the sums behind a log-probability are taken in another order in a larger chunk
        assert mine.logprob == pytest.approx(yours.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in yours.top]


def after(whole: Result, cut: int) -> Result:
    return Result(whole.tokens[cut:], whole.finish_reason, whole.stop_token, logprobs=whole.logprobs[cut:])


def make(name: str) -> Request:
    return make_request("r", PROMPT, **{"seed": 77, "max_tokens": LENGTH, **CASES[name]})


@pytest.fixture(scope="module")
def engines(tiny: Callable[..., Path]) -> tuple[Engine, Engine]:
    """The one that is lost, and the one that goes on: other chunks, other company, other cache."""
    folder = tiny("llama")
    other = make_engine(folder, max_num_batched_tokens=7)
    run(other, [make_request("turn before", PROMPT[:9])])
    return make_engine(folder), other


@pytest.mark.parametrize("name", CASES)
def test_goes_on_as_it_would_have(name: str, engines: tuple[Engine, Engine]) -> None:
    lost, other = engines
    request = make(name)
    whole = run(lost, [request])
    if name == "min_tokens":
        assert 10 <= len(whole["r", 0].tokens) < LENGTH and whole["r", 0].stop_token == EOS
    if name == "n that ends apart":
        assert len({len(result.tokens) for result in whole.values()}) > 1
    for cut in (1, 2, 7, 8, 15, 23):
        rests = [
            rest_of(request, sample, result.tokens[:cut])
            for (_, sample), result in whole.items()
            if cut < len(result.tokens)
        ]
        # all samples of a request move together, under its id, and meet somebody else's work there
        got = run(other, [make_request("company", [3, 4, cut + 2], temperature=1.0, seed=1), *rests])
        assert len(got) == len(rests) + 1
        for rest in rests:
            key = "r", rest.sample_index
            same(got[key], after(whole[key], cut))


def test_a_stop_token_ends_it_where_it_would_have(engines: tuple[Engine, Engine]) -> None:
    lost, other = engines
    plain = run(lost, [make("seeded")])["r", 0].tokens
    stop = next(token for i, token in enumerate(plain) if i >= 10 and token not in plain[:i])
    request = make_request("r", PROMPT, seed=77, temperature=1.0, max_tokens=LENGTH, stop_token_ids=[stop])
    whole = run(lost, [request])["r", 0]
    assert whole.stop_token == stop and 10 < len(whole.tokens) < LENGTH
    for cut in range(1, len(whole.tokens)):
        same(run(other, [rest_of(request, 0, whole.tokens[:cut])])["r", 0], after(whole, cut))


def test_moves_again_and_again(engines: tuple[Engine, Engine]) -> None:
    request = make("logprobs")
    whole = run(engines[0], [request])["r", 0]
    tokens: list[int] = []
    for hop in range(5):
        engine = engines[hop % 2]
        engine.add(rest_of(request, 0, tokens) if tokens else request)
        for _ in range(4):
            tokens += [token for output in engine.step().outputs for token in output.token_ids]
        engine.abort("r")
        engine.check_integrity()
        assert tokens == whole.tokens[: len(tokens)]
    same(run(engines[1], [rest_of(request, 0, tokens)])["r", 0], after(whole, len(tokens)))


def test_its_own_tokens_are_found_in_the_cache(tiny: Callable[..., Path]) -> None:
    """A replica that held the conversation before computes only what it does not know."""
    engine = make_engine(tiny("llama"))
    request = make("greedy")
    whole = run(engine, [request])["r", 0].tokens
    before = engine.stats().computed_prompt_tokens
    run(engine, [rest_of(request, 0, whole[:15])])
    assert engine.stats().computed_prompt_tokens - before == 4  # of 28, the last block is computed anyway
