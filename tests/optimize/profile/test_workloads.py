"""Workloads: what the names mean, what a file may hold, and that a run can be repeated step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core.errors import UsageError
from headrace.optimize.profile.workloads import NAMES, load_workload, run
from tests.engine.harness import make_engine


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_one_workload_that_fits(name: str) -> None:
    workload = load_workload(name, 320, max_len=64)
    assert workload == load_workload(name, 320, max_len=64)
    assert workload != load_workload(name, 320, max_len=64, seed=1)
    assert workload.longest <= 64
    assert all(0 <= token < 320 for request in workload.requests for token in request.prompt)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_repeats_step_by_step(tiny: Callable[..., Path], name: str) -> None:
    engine = make_engine(tiny("llama"), max_num_batched_tokens=32)
    workload = load_workload(name, engine.vocab_size, max_len=engine.max_model_len)
    first = run(engine, workload)
    again = run(engine, workload, admissions=first.admissions)
    assert [len(tokens) for tokens in first.tokens] == [each.max_tokens for each in workload.requests]
    assert first.tokens == again.tokens and first.admissions == again.admissions
    assert [(s.prompt_tokens, s.output_tokens) for s in first.steps] == [
        (s.prompt_tokens, s.output_tokens) for s in again.steps
    ]
    assert (first.decode_tok_s > 0) == (name != "prefill") and first.prefill_tok_s > 0


def test_a_file_of_requests(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    path = tmp_path / "recorded.jsonl"
    lines = [
        {"prompt": "abc", "max_tokens": 3, "arrival_s": 0.02},
        {"prompt_token_ids": [5, 6, 7, 8], "max_tokens": 2},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    workload = load_workload(str(path), 320, encode=lambda text: [ord(letter) for letter in text])
    assert [request.prompt for request in workload.requests] == [[5, 6, 7, 8], [97, 98, 99]]
    done = run(make_engine(tiny("llama")), workload)
    assert [len(tokens) for tokens in done.tokens] == [2, 3]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"max_tokens": 3}',
        '{"prompt": [1, 320]}',
        '{"prompt": [1], "max_tokens": 0}',
        '{"prompt": "text"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text('{"prompt": [1]}\n' + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        load_workload(str(path), 320)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UsageError) as error:
        load_workload("decoed", 320)
    assert error.value.hint is not None and "decode" in error.value.hint
