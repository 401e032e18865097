from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.core.packs import KernelEntry
from headrace.optimize.proposal import CandidateSource, Trial
from headrace.optimize.proposers.search import Search
from headrace.optimize.proposers.space import SPACES, VALUES, first_guess
from headrace.optimize.records import CallShape, Candidate, Measurement, Target, Verdict
from tests.optimize.fakes import ratio

SHAPE = CallShape(phase="decode", rows=1, context=200, calls_per_step=30, dtype="float32", dims={})
TARGET = Target(
    op="decoder_layer",
    model="tiny",
    phase="decode",
    weight_dtype="bfloat16",
    activation_dtypes=["float32"],
    max_rows=8,
    shapes=[SHAPE],
    dims={
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "v_head_dim": 64,
    },
    floats={},
    present=[],
    layers=30,
    baseline_s=1e-4,
    end_to_end_gain=2.0,
    why="",
)


def judged(source: CandidateSource, number: int, speed: float | None) -> Trial:
    """``speed`` None: it failed."""
    name = f"{number:02}"
    candidate = Candidate(
        name=name, folder=name, digest=name, author=source.author, parameters=source.parameters
    )
    verdict = Verdict(
        candidate=name,
        digest=name,
        passed=speed is not None,
        reason="ok" if speed is not None else "wrong_result",
        detail="",
        seconds=0.0,
        sandbox="",
    )
    measurement = None
    if speed is not None:
        measurement = Measurement(
            candidate=name,
            digest=name,
            alone={"decode/1": ratio(speed)},
            end_to_end={},
            agreement="",
            won=speed > 1,
            detail="",
        )
    return Trial(candidate, Path(name), verdict, measurement)


def climb(speed_of: Callable[[dict[str, str]], float | None], count: int, seed: int = 1) -> list[Trial]:
    history: list[Trial] = []
    best: Trial | None = None
    rng = random.Random(seed)
    for number in range(count):
        source = Search(threads=2).propose(TARGET, best, history, rng)
        if source is None:
            break
        trial = judged(source, number, speed_of(source.parameters))
        history.append(trial)
        if best is None or trial.speed > best.speed:
            best = trial
    return history


def test_it_begins_where_the_roofline_says() -> None:
    source = Search(threads=2).propose(TARGET, None, [], random.Random(0))
    assert source is not None
    guess = first_guess(TARGET, 2)
    assert {name: source.parameters[name] for name in guess} == {n: str(v) for n, v in guess.items()}
    assert guess["panels"] == 2  # four side by side would leave one of two threads a tenth more work
    text = source.files[source.entry.source]
    assert "#define HR_FAN 3" in text and "#define HR_MAX_ROWS 8" in text
    assert '#include "vectors.cpp"' not in text


def test_nothing_is_proposed_twice() -> None:
    rng = random.Random(3)
    history = climb(lambda _: rng.choice([None, 1.1, 1.2, 1.5]), 80)
    seen = [tuple(sorted(trial.candidate.parameters.items())) for trial in history]
    assert len(seen) == len(set(seen)) > 25


def test_it_climbs_to_the_top() -> None:
    def speed(parameters: dict[str, str]) -> float:
        far = abs(VALUES["prefetch"].index(int(parameters["prefetch"])) - 5)
        return 2.0 - 0.1 * far - 0.2 * abs(VALUES["chunk"].index(int(parameters["chunk"])) - 1)

    history = climb(speed, 20)
    top = max(history, key=lambda trial: trial.speed).candidate.parameters
    assert (top["prefetch"], top["chunk"]) == ("12288", "128")


def test_it_goes_further_where_a_step_has_helped() -> None:
    history = climb(lambda parameters: 1.0 + int(parameters["prefetch"]) / 1e5, 10)
    steps = [trial.candidate.parameters["prefetch"] for trial in history]
    helped = steps.index("8192")
    assert steps[helped + 1] == "12288"


def test_a_failed_first_candidate_does_not_end_it() -> None:
    assert len(climb(lambda _: None, 5)) == 5


def test_somebody_elses_best_does_not_confuse_it() -> None:
    first = climb(lambda _: 1.5, 1)
    source = CandidateSource(
        files={"a.cpp": ""}, entry=KernelEntry(op="decoder_layer", source="a.cpp"), author="agent:x"
    )
    other = judged(source, 9, 3.0)
    assert Search(threads=2).propose(TARGET, other, [*first, other], random.Random(0)) is not None


@pytest.mark.parametrize("op", sorted(SPACES))
def test_every_template_is_written_out_whole(op: str) -> None:
    dims = {**TARGET.dims, "in_features": 576, "out_features": 960, "size": 576}
    source = Search(threads=2).propose(
        msgspec.structs.replace(TARGET, op=op, dims=dims), None, [], random.Random(0)
    )
    assert source is not None
    assert "hr_run" in source.files[source.entry.source]


def test_it_has_nothing_for_what_no_template_computes() -> None:
    search, rng = Search(threads=2), random.Random(0)
    for changed in ({"op": "rope"}, {"phase": "prefill"}, {"weight_dtype": "float32"}, {"module": "a.py:M"}):
        assert search.propose(msgspec.structs.replace(TARGET, **changed), None, [], rng) is None


def test_an_op_without_parameters_has_one_candidate() -> None:
    target = msgspec.structs.replace(TARGET, op="rms_norm", dims={"size": 576})
    search, rng = Search(threads=2), random.Random(0)
    first = search.propose(target, None, [], rng)
    assert first is not None
    assert search.propose(target, None, [judged(first, 0, 1.2)], rng) is None
