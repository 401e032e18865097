"""Sampling through the whole engine: seeds, samples, ends, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.request import Request, SamplingParams
from headrace.engine.rng import uniforms
from tests.engine import oracle
from tests.engine.harness import (
    make_engine,
    make_request,
    reference_greedy,
    reference_logprobs,
    run,
    run_tokens,
)
from tests.models.tiny import load_reference

PROMPT = [11, 48, 85, 122, 159, 196, 233, 270, 9, 46, 83, 120, 157]
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 20, "temperature": 1.5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.8},
    {"presence_penalty": -1.0, "top_p": 0.9, "logit_bias": {5: 3.0}},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 0.0},
]
SEEDED = [
    make_request(
        str(i), [i + 2, *PROMPT[: 3 + i]], seed=40 + i, max_tokens=12, **{"temperature": 1.0, **params}
    )
    for i, params in enumerate(PARAMETERS)
]


def test_a_seed_gives_the_same_tokens_in_any_company(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3")
    alone = [run_tokens(make_engine(folder), [request])[0] for request in SEEDED]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    assert run_tokens(make_engine(folder), SEEDED) == alone, "one batch"
    assert run_tokens(make_engine(folder, max_num_batched_tokens=5), SEEDED, stagger=3) == alone, "chunks"
    crowded = make_engine(folder, num_blocks=18)
    assert run_tokens(crowded, SEEDED) == alone, "preemption"
    assert crowded.stats().num_preemptions >= 2


def test_every_parameter_through_the_engine_follows_its_definition(tiny: Callable[..., Path]) -> None:
    """Each token is the one that the definition draws from Transformers' logits."""
    folder = tiny("llama")
    reference = load_reference(folder)
    results = run(make_engine(folder), SEEDED)
    for request in SEEDED:
        prompt, output = request.token_ids().tolist(), results[request.request_id, 0].tokens
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0].double().numpy()
        numbers = uniforms(request.sampling.seed or 0, 0, 0, len(output))
        for position, token in enumerate(output):
            values = oracle.processed(
                logits[len(prompt) + position - 1], request.sampling, prompt, output[:position], [1]
            )
            if request.sampling.temperature == 0:
                assert token == values.argmax()
            else:
                assert token == oracle.pick(oracle.distribution(values, request.sampling), numbers[position])


def test_samples_of_one_request(tiny: Callable[..., Path]) -> None:
    """Each sample has its own numbers, the prompt is computed once, and sample 0 is what n=1 gives."""
    folder = tiny("llama")
    engine = make_engine(folder)
    results = run(engine, [make_request("n", PROMPT, n=5, temperature=1.0, seed=3)])
    assert sorted(results) == [("n", i) for i in range(5)]
    samples = [results["n", i].tokens for i in range(5)]
    assert len({tuple(tokens) for tokens in samples}) == 5
    assert [results["n", i].num_cached_tokens for i in range(5)] == [0, 12, 12, 12, 12]
    assert (
        run_tokens(make_engine(folder), [make_request("1", PROMPT, temperature=1.0, seed=3)]) == samples[:1]
    )
    uncached = make_engine(folder, enable_prefix_caching=False)
    again = run(uncached, [make_request("n", PROMPT, n=5, temperature=1.0, seed=3)])
    assert [again["n", i].tokens for i in range(5)] == samples


def test_a_rescued_stream_goes_on_as_it_would_have(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    for request in SEEDED:
        whole = run_tokens(make_engine(folder), [request])[0]
        prompt = request.token_ids()
        prompt.extend(whole[:5])
        rest = Request(
            request_id="rest", prompt=prompt.tobytes(), sampling=request.sampling, num_output_tokens=5
        )
        assert run_tokens(make_engine(folder), [rest]) == [whole[5:]]


def test_a_rescued_request_gets_its_prompt_logprobs_however_it_is_chunked(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    request = make_request("whole", PROMPT, max_tokens=40, prompt_logprobs=2)
    whole = run(make_engine(folder), [request])["whole", 0]
    prompt = request.token_ids()
    prompt.extend(whole.tokens[:30])
    rest = Request(
        request_id="rest", prompt=prompt.tobytes(), sampling=request.sampling, num_output_tokens=30
    )
    got = run(make_engine(folder, max_num_batched_tokens=7), [rest])["rest", 0]
    assert got.tokens == whole.tokens[30:]
    assert got.prompt_logprobs is not None and whole.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == len(PROMPT)
    for one, other in zip(got.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert one is not None and other is not None
        assert one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-4


def test_requests_without_a_seed_differ_and_can_be_repeated(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    requests = [make_request(str(i), PROMPT, temperature=1.0) for i in range(3)]
    tokens = run_tokens(make_engine(folder, seed=5), requests)
    assert len({tuple(t) for t in tokens}) == 3
    assert run_tokens(make_engine(folder, seed=5), requests) == tokens
    assert run_tokens(make_engine(folder, seed=6), requests) != tokens
    assert run_tokens(make_engine(folder), requests) != run_tokens(make_engine(folder), requests)


def test_ends(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    greedy = run_tokens(make_engine(folder), [make_request("g", PROMPT, max_tokens=30)])[0]
    third = greedy[2]
    first = greedy.index(third)
    requests = [
        make_request("length", PROMPT, max_tokens=4),
        make_request("stop", PROMPT, max_tokens=30, stop_token_ids=[third, 300]),
        make_request("later", PROMPT, max_tokens=30, stop_token_ids=[third], min_tokens=first + 2),
        make_request("context", PROMPT, max_tokens=None),
        make_request("full", PROMPT, max_tokens=1000),
    ]
    results = {name: result for (name, _), result in run(make_engine(folder), requests).items()}
    assert (results["length"].tokens, results["length"].finish_reason) == (greedy[:4], "length")
    stopped = results["stop"]
    assert (stopped.tokens, stopped.finish_reason, stopped.stop_token) == (greedy[: first + 1], "stop", third)
    later = results["later"]
    assert third not in later.tokens[: first + 2] and len(later.tokens) >= first + 2
    for name in ("context", "full"):
        assert results[name].finish_reason == "length"
        assert len(results[name].tokens) == 64 - len(PROMPT)


def test_end_of_text(tiny: Callable[..., Path]) -> None:
    """Token 1 ends the text, not before ``min_tokens``, and not when it is ignored."""
    folder = tiny("llama")
    common = {"max_tokens": 8, "logit_bias": {1: 100.0}}
    requests = [
        make_request("ends", PROMPT, ignore_eos=False, **common),
        make_request("waits", PROMPT, ignore_eos=False, min_tokens=3, **common),
        make_request("ignores", PROMPT, ignore_eos=True, min_tokens=3, **common),
    ]
    results = {name: result for (name, _), result in run(make_engine(folder), requests).items()}
    assert (results["ends"].tokens, results["ends"].finish_reason, results["ends"].stop_token) == (
        [1],
        "stop",
        1,
    )
    assert 1 not in results["waits"].tokens[:3] and results["waits"].tokens[3:] == [1]
    assert (results["ignores"].tokens, results["ignores"].finish_reason) == ([1] * 8, "length")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_logprobs_equal_transformers(family: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(family)
    reference = load_reference(folder)
    long = [PROMPT[i % 13] + i for i in range(30)]
    requests = [
        make_request("short", [7], logprobs=2, prompt_logprobs=2),
        make_request("long", long, logprobs=0, prompt_logprobs=4, temperature=1.0, seed=1),
        make_request("again", long, logprobs=20, prompt_logprobs=0, presence_penalty=2.0),
        make_request("pair", long[:9], prompt_logprobs=1, n=2, temperature=1.0, seed=5),
        make_request("plain", long),
    ]
    # few blocks: some prompts are preempted and begin again
    engine = make_engine(folder, num_blocks=26, max_num_batched_tokens=7)
    results = run(engine, requests)
    assert results["plain", 0].prompt_logprobs is None and results["plain", 0].logprobs == []
    for request in requests[:4]:
        prompt = request.token_ids().tolist()
        for sample in range(request.sampling.n):
            result = results[request.request_id, sample]
            expected = reference_logprobs(reference, prompt + result.tokens)
            entries = result.prompt_logprobs
            assert entries is not None and entries[0] is None and len(entries) == len(prompt)
            rows = list(zip(entries[1:], range(len(prompt) - 1), strict=True))
            if request.sampling.logprobs is not None:
                assert len(result.logprobs) == len(result.tokens)
                rows += zip(result.logprobs, range(len(prompt) - 1, len(expected) - 1), strict=True)
            tokens = prompt + result.tokens
            for entry, row in rows:
                assert entry is not None and entry.token_id == tokens[row + 1]
                value = expected[row, entry.token_id]
                assert entry.logprob == pytest.approx(value.item(), abs=2e-4)
                margin = 1e-4  # ranks of near ties may swap
                low = 1 + int((expected[row] > value + margin).sum())
                high = 1 + int((expected[row] > value - margin).sum())
                assert low <= entry.rank <= high
                is_prompt = row < len(prompt) - 1
                wanted = request.sampling.prompt_logprobs if is_prompt else request.sampling.logprobs
                assert [v for _, v in entry.top] == pytest.approx(
                    expected[row].topk(wanted or 0).values.tolist(), abs=2e-4
                )
                assert all(v == pytest.approx(expected[row, i].item(), abs=2e-4) for i, v in entry.top)


def test_prompt_logprobs_of_a_long_prompt_are_made_in_slices(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace.engine.model_runner as model_runner

    folder = tiny("llama")
    request = make_request("r", [(7 * i) % 300 + 2 for i in range(40)], prompt_logprobs=3, max_tokens=2)
    whole = run(make_engine(folder, max_num_batched_tokens=64), [request])["r", 0].prompt_logprobs
    monkeypatch.setattr(model_runner, "_PROMPT_LOGITS_BYTES", 320 * 4 * 3)
    monkeypatch.setattr(model_runner, "_SAMPLE_LOGITS_BYTES", 320 * 4)
    engine = make_engine(folder, max_num_batched_tokens=64)
    largest = 0
    plain = engine.runner.model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(hidden))
        return plain(hidden)

    monkeypatch.setattr(engine.runner.model, "logits", watched)
    sliced = run(engine, [request, *SEEDED[:3]])["r", 0].prompt_logprobs
    assert largest == 3
    assert whole is not None and sliced is not None
    for one, other in zip(whole[1:], sliced[1:], strict=True):
        assert one is not None and other is not None
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([], {}, InvalidRequestError, "prompt"),
        ([320], {}, InvalidRequestError, "prompt"),
        ([2**32 - 1], {}, InvalidRequestError, "prompt"),
        ([2] * 64, {}, ContextLengthError, "prompt"),
        ([2], {"temperature": float("inf")}, InvalidRequestError, "temperature"),
        ([2], {"top_p": 0.0}, InvalidRequestError, "top_p"),
        ([2], {"stop_token_ids": [320]}, InvalidRequestError, "stop_token_ids"),
        ([2], {"logprobs": 21}, InvalidRequestError, "logprobs"),
    ],
)
def test_bad_requests_are_refused_with_the_field(
    prompt: list[int],
    params: dict[str, Any],
    error: type[InvalidRequestError],
    param: str,
    tiny: Callable[..., Path],
) -> None:
    engine = make_engine(tiny("llama"))
    with pytest.raises(error) as caught:
        engine.add(make_request("bad", prompt, **params))
    assert caught.value.param == param
    assert not engine.has_work
    with pytest.raises(InvalidRequestError, match="4 bytes"):
        engine.add(Request(request_id="odd", prompt=b"\x01\x00\x00", sampling=SamplingParams()))
    with pytest.raises(InvalidRequestError, match="adapter"):
        engine.add(
            Request(request_id="a", prompt=b"\x01\x00\x00\x00", sampling=SamplingParams(), adapter="x")
        )


def test_greedy_is_what_transformers_says_for_one_token(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    expected = reference_greedy(load_reference(folder), PROMPT, 1)
    assert run_tokens(make_engine(folder), [make_request("1", PROMPT, max_tokens=1)]) == [expected]
