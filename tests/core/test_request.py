"""Sampling parameters out of range are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.core.errors import InvalidRequestError
from headrace.core.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("seed", 2**63),
        ("stop", ["a", ""]),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(vocab_size=100)
    assert caught.value.param == field


def test_the_edges_are_allowed() -> None:
    SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        seed=-(2**63),
        stop_token_ids=[0, 99],
        logit_bias={99: -100.0},
        max_tokens=None,
        min_tokens=5,
    ).validate(vocab_size=100)
