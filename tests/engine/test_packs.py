"""A pack is prepared beside the step loop, flipped between two steps, and scored without being served."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidRequestError, NotFoundError, PackError
from headrace.core.knobs import EngineConfig
from headrace.core.messages import PackFailed, PackReady, Score, Scores
from headrace.engine.engine import Engine
from headrace.kernels.native.pack import read_manifest
from tests.engine.harness import make_request, run
from tests.engine.packs import load, write_pack

PROMPT = [(7 * i) % 300 + 2 for i in range(20)]
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "kv_cache_gib": 0.02,
}


def make(folder: Path, **knobs: Any) -> tuple[Engine, threading.Event]:
    woken = threading.Event()
    return Engine(EngineConfig(**CONFIG, **knobs), folder, load_pack=load, wake=woken.set), woken


def prepared(engine: Engine, woken: threading.Event, pack_id: str, folder: Path) -> PackReady | PackFailed:
    engine.packs.prepare(pack_id, folder)
    assert woken.wait(60)
    woken.clear()
    ((told, message),) = engine.packs.take()
    assert told == pack_id
    return message


def test_three_steps_under_a_running_request(tiny: Callable[..., Path], tmp_path: Path) -> None:
    engine, woken = make(tiny("llama"))
    pack = write_pack(tmp_path / "same", "same", prepare_s=0.2)
    wanted = run(engine, [make_request("a", PROMPT, max_tokens=40)])["a", 0].tokens
    engine.add(make_request("b", PROMPT, max_tokens=40))
    engine.packs.prepare(pack, tmp_path / "same")
    with pytest.raises(InvalidRequestError, match="being prepared"):
        engine.packs.prepare(pack, tmp_path / "same")
    tokens = []
    while not woken.is_set():  # steps go on beside the preparation
        if engine.has_work:
            tokens += [token for output in engine.step().outputs for token in output.token_ids]
    assert len(tokens) > 3
    with pytest.raises(NotFoundError):
        engine.use_pack(pack)
    ((_, ready),) = engine.packs.take()
    assert isinstance(ready, PackReady) and ready.seconds >= 0.2
    while engine.has_work:
        engine.step()
    engine.add(make_request("c", PROMPT, max_tokens=40))
    tokens = []
    for _ in range(6):
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    engine.use_pack(pack)
    assert engine.stats().pack == pack and engine.step_times.num_steps == 0
    assert engine.runner.model.ops.provenance["logits_head"] == pack
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    assert tokens == wanted
    assert [time.rows for time in engine.step_times.medians()] == [1]
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.packs.retire(pack)
    engine.use_pack("")
    engine.packs.retire(pack)
    with pytest.raises(NotFoundError):
        engine.use_pack(pack)
    engine.check_integrity()


def test_what_cannot_be_prepared_is_told_and_nothing_changes(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    engine, woken = make(tiny("llama"))
    broken = write_pack(tmp_path / "broken", "broken")
    for pack_id, folder, words in (
        (broken, tmp_path / "broken", "nothing can be made of this"),
        ("0" * 64, tmp_path / "broken", f"holds pack {broken[:12]}"),
        ("1" * 64, tmp_path / "nowhere", "is no pack"),
    ):
        message = prepared(engine, woken, pack_id, folder)
        assert isinstance(message, PackFailed) and words in message.failed.message
    assert engine.stats().pack == "" and set(engine.runner.model.ops.provenance.values()) <= {
        "stock",
        "reference",
    }
    with pytest.raises(PackError, match="nothing can be made"):
        make(tiny("llama"), pack=str(tmp_path / "broken"))


def test_an_engine_starts_with_its_pack(tiny: Callable[..., Path], tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "same", "same")
    engine, _ = make(tiny("llama"), pack=str(tmp_path / "same"))
    plain, _ = make(tiny("llama"))
    assert engine.stats().pack == pack and engine.kv_format != plain.kv_format
    assert any(f"kernels: pack {pack[:12]} (logits_head)" in note for note in engine.hello_fields["notes"])


def sequences(count: int, length: int) -> list[bytes]:
    return [
        array("I", [(31 * i + 7 * j) % 300 + 2 for j in range(length + i)]).tobytes() for i in range(count)
    ]


def scores(engine: Engine, score: Score) -> Scores:
    engine.score(score)
    assert engine.wait_s() == 0.0
    deadline = time.monotonic() + 60
    while engine.scorer.busy:
        engine.step()
        assert time.monotonic() < deadline
    (message,) = engine.scorer.take()
    assert isinstance(message, Scores), message
    return message


@pytest.mark.parametrize("chunk", [1, 3, 0])
def test_scores_are_those_of_prompt_logprobs(tiny: Callable[..., Path], tmp_path: Path, chunk: int) -> None:
    engine, woken = make(tiny("llama"))
    wrong = write_pack(tmp_path / "wrong", "wrong", every=10, error=1.0)
    prepared(engine, woken, wrong, tmp_path / "wrong")
    tokens = sequences(6, 21)
    own, other = scores(engine, Score(tokens, [1, 2, 5], ["", wrong], chunk, 3)).scored
    assert (own.pack_id, other.pack_id) == ("", wrong)
    served = run(
        engine,
        [
            make_request(str(i), list(array("I", packed)), max_tokens=1, prompt_logprobs=3)
            for i, packed in enumerate(tokens)
        ],
    )
    num_wrong = 0
    for i, found in enumerate(own.sequences):
        wanted = served[str(i), 0].prompt_logprobs
        assert wanted is not None and len(found) == len(wanted) - 1
        for one, two, three in zip(found, wanted[1:], other.sequences[i], strict=True):
            assert two is not None and one.token_id == two.token_id
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
            num_wrong += abs(three.logprob - one.logprob) > 1e-3
    num_positions = sum(map(len, own.sequences))
    assert num_wrong == num_positions // 10
    if chunk == 1:
        rows = {time.rows: time.count for time in own.times}
        assert rows[1] == 20 + 1 + 1 and rows[3] > 10, "groups of 1, 2 and 3, of unequal lengths"
    assert engine.runner.model.ops.provenance["logits_head"] == "stock"


def test_scoring_leaves_what_is_served_alone(tiny: Callable[..., Path], tmp_path: Path) -> None:
    engine, woken = make(tiny("llama"))
    raises = write_pack(tmp_path / "raises", "raises")
    wrong = write_pack(tmp_path / "wrong", "wrong", every=1, error=9.0)
    prepared(engine, woken, raises, tmp_path / "raises")
    prepared(engine, woken, wrong, tmp_path / "wrong")
    requests = [make_request(str(i), PROMPT[i:], max_tokens=30) for i in range(4)]
    wanted = run(engine, requests)
    assert len(engine.recorded.sequences()) == 4
    engine.score(Score(sequences(8, 30), [8], ["", wrong], 1, 5))
    with pytest.raises(InvalidRequestError, match="being scored"):
        engine.score(Score(sequences(1, 30), [1], [""], 1, 5))
    again = run(engine, requests)
    assert {key: result.tokens for key, result in again.items()} == {
        key: result.tokens for key, result in wanted.items()
    }
    while engine.scorer.busy:
        engine.step()
    engine.scorer.take()
    engine.score(Score(sequences(1, 30), [1], [raises], 1, 5))
    while engine.scorer.busy:
        engine.step()
    (message,) = engine.scorer.take()
    assert isinstance(message, PackFailed) and "a kernel of its own mind" in message.failed.message


@pytest.mark.parametrize(
    "score",
    [
        Score([], [1], [""], 1, 5),
        Score(sequences(2, 30), [1], [""], 1, 5),
        Score(sequences(1, 600), [1], [""], 1, 5),
        Score([b"abc"], [1], [""], 1, 5),
        Score([array("I", [1, 10_000]).tobytes()], [1], [""], 1, 5),
        Score(sequences(1, 30), [0], [""], 1, 5),
    ],
)
def test_nonsense_is_refused(tiny: Callable[..., Path], score: Score) -> None:
    engine, _ = make(tiny("llama"))
    with pytest.raises(InvalidRequestError):
        engine.score(score)


def test_a_manifest_that_is_a_pipe(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """It is refused at once: nobody waits for its other end."""
    os.mkfifo(tmp_path / "pack.json")
    engine, woken = make(tiny("llama"))
    message = prepared(engine, woken, "f" * 64, tmp_path)
    assert isinstance(message, PackFailed) and "no regular file" in message.failed.message
    with pytest.raises(PackError, match="no regular file"):
        read_manifest(tmp_path)
