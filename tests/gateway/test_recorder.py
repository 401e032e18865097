"""Answers are recorded whole, across rescues, within bounds, and callers see nothing of it."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.core.errors import RecordError, UsageError
from headrace.core.knobs import GatewayConfig
from headrace.core.messages import Origin
from headrace.core.recording import (
    DAMAGED,
    UNKNOWN,
    AnswerRecord,
    encode_record,
    find_record,
    float_bits,
    write_record,
)
from headrace.gateway.recorder import Recorder
from headrace.text.tokenizer import Tokenizer
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import Stack, chat, complete

ORIGIN = Origin(
    revision="rev",
    dtype="bfloat16",
    quantization="auto",
    form="",
    pack="p" * 64,
    batch_invariant=True,
    hardware="fake",
    version="0",
    torch="0",
)
TEXT = "The capital of France is Paris."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "answers"


@pytest.fixture
def stack(tokenizer: Tokenizer, tmp_path: Path, folder: Path) -> Iterator[Stack]:
    config = GatewayConfig(port=0, shutdown_grace_s=0.5, record=str(folder))
    with Stack(tokenizer, tmp_path, config, num_replicas=2) as made:
        for replica in made.replicas:
            replica.origin = ORIGIN
        made.answer(TEXT)
        yield made


def recorded(stack: Stack, folder: Path, wanted: str) -> AnswerRecord:
    """The record of an id, once it is there."""

    def found() -> bool:
        try:
            find_record(folder, wanted)
        except RecordError:
            return False
        return True

    stack.wait_for(found, f"a record of {wanted}")
    return find_record(folder, wanted)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_kept_and_what_the_caller_sees(stack: Stack, folder: Path, stream: bool) -> None:
    answer = chat(stack, stream=stream, max_tokens=50)
    first = answer.events[0] if stream else answer.json
    record = recorded(stack, folder, first["id"])
    tokens = [*stack.tokenizer.encode(TEXT, False).tolist(), stack.replica.eos]
    (request,) = record.requests
    (sample,) = request.samples
    assert sample.token_ids == tokens and sample.finish_reason == "stop"
    assert sample.logprob_bits == [float_bits(-0.5)] * len(tokens)
    assert sample.origins == record.origins == [ORIGIN]
    assert record.caller_id == answer.headers["x-request-id"]
    assert find_record(folder, record.caller_id) == record
    asked = next(one for replica in stack.replicas for one in replica.requests)
    assert request.prompt == asked.token_ids().tolist()
    assert request.sampling == asked.sampling and request.sampling.seed is not None
    assert request.sampling.logprobs is None and asked.record
    body = answer.body.decode()
    assert "0.5" not in body, "log-probabilities that nobody asked for"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / f"{record.id}.json").stat().st_mode) == 0o600


def test_log_probabilities_that_were_asked_for_are_shown(stack: Stack, folder: Path) -> None:
    answer = complete(stack, logprobs=1, max_tokens=4).json
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 4
    record = recorded(stack, folder, answer["id"])
    assert record.requests[0].sampling.logprobs == 1
    assert record.requests[0].samples[0].logprob_bits == [float_bits(-0.5)] * 4


def test_several_prompts_and_samples(stack: Stack, folder: Path) -> None:
    answer = complete(stack, prompt=["hello", "world"], n=3, max_tokens=4).json
    record = recorded(stack, folder, answer["id"])
    assert [len(request.samples) for request in record.requests] == [3, 3]
    assert len({request.sampling.seed for request in record.requests}) == 2
    assert all(len(one.token_ids) == 4 for request in record.requests for one in request.samples)
    assert find_record(folder, f"{answer['id']}-1") == record, "the second prompt's own id"


def test_a_stop_string_ends_the_record_where_it_was_found(stack: Stack, folder: Path) -> None:
    answer = complete(stack, stop=["France"], max_tokens=50).json
    record = recorded(stack, folder, answer["id"])
    (sample,) = record.requests[0].samples
    assert sample.finish_reason == "stop"
    assert "France" in stack.tokenizer.decode(sample.token_ids)
    assert "Paris" not in stack.tokenizer.decode(sample.token_ids)


def test_a_rescued_answer_is_one_record(stack: Stack, folder: Path) -> None:
    tokens = stack.tokenizer.encode(TEXT, False).tolist()
    lost: list[str] = []

    def plan(request: object) -> Plan:
        dies = None if lost else 3
        lost.append("")
        return Plan(tokens=tokens, die_after=dies)

    stack.plan(plan)
    answer = chat(stack, max_tokens=50)
    assert answer.json["choices"][0]["message"]["content"] == TEXT
    record = recorded(stack, folder, answer.json["id"])
    (sample,) = record.requests[0].samples
    assert record.num_rescues == 1 and len(lost) == 2
    assert sample.token_ids == [*tokens, stack.replica.eos]
    assert len(sample.logprob_bits) == len(sample.token_ids) and sample.origins == [ORIGIN]
    other = msgspec.structs.replace(ORIGIN, pack="q" * 64)
    lost.clear()
    for number, replica in enumerate(stack.replicas):
        replica.origin = (ORIGIN, other)[number]
    record = recorded(stack, folder, chat(stack, max_tokens=50).json["id"])
    assert len(record.origins) == 2, "computed by two packs, and it says so"


def test_what_is_not_kept(stack: Stack, folder: Path) -> None:
    """A failed answer, and one of a server that does not say what computed it."""
    stack.plan(lambda request: Plan(tokens=[1, 2], die_after=0))
    failed = chat(stack, max_tokens=5)
    assert failed.status != 200
    for replica in stack.replicas:
        replica.origin = None
    stack.answer(TEXT)
    stack.wait_for(lambda: stack.client.alive)
    unknown = chat(stack, max_tokens=5)
    assert unknown.status == 200
    for replica in stack.replicas:
        replica.origin = ORIGIN
    last = chat(stack, max_tokens=5)
    recorded(stack, folder, last.json["id"])
    assert [path.stem for path in folder.glob("*.json")] == [last.json["id"]]


def make_record(answer_id: str, *, created: str = "2026-01-01", caller: str = "c") -> AnswerRecord:
    return AnswerRecord(
        format=1,
        id=answer_id,
        caller_id=caller,
        created=created,
        model="m",
        source="m",
        max_model_len=10,
        num_rescues=0,
        requests=[],
    )


def test_bounds(folder: Path) -> None:
    log = logging.getLogger("headrace.test")
    recorder = Recorder(folder, max_answers=3, max_bytes=10_000, log=log)
    for number in range(6):
        recorder.keep(make_record(f"a{number}"))
    recorder.close()
    assert sorted(path.stem for path in folder.iterdir()) == ["a3", "a4", "a5"]
    size = (folder / "a3.json").stat().st_size
    recorder = Recorder(folder, max_answers=100, max_bytes=2 * size, log=log)
    recorder.keep(make_record("a6"))
    recorder.keep(make_record("b" * 200 * 1000))
    recorder.close()
    assert sorted(path.stem for path in folder.iterdir()) == ["a5", "a6"]


def test_a_folder_that_fails(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--record"):
        Recorder(tmp_path / "file", max_answers=1, max_bytes=1000, log=logging.getLogger("x"))
    recorder = Recorder(folder, max_answers=3, max_bytes=10_000, log=logging.getLogger("headrace.test"))
    os.rmdir(folder)
    for number in range(3):
        recorder.keep(make_record(f"a{number}"))
    recorder.close()
    assert caplog.text.count("is not recorded") == 1


def test_records_are_found_and_damage_is_told(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        record = make_record(f"a{number}", created=f"2026-01-0{number + 1}", caller="same")
        write_record(folder, record.id, encode_record(record))
    assert find_record(folder, "a1").id == "a1"
    assert find_record(folder, "same").id == "a2", "the newest of a request id that was used again"
    path = folder / "a1.json"
    whole = path.read_bytes()
    cases = {
        "cut short": whole[:-20],
        "one byte": whole.replace(b'"source":"m"', b'"source":"n"'),
        "no record": b"{}",
        "no text": b"\xff\xfe",
        "empty": b"",
        "another shape": json.dumps({"digest": "0" * 64, "record": []}).encode(),
    }
    for what, body in cases.items():
        path.write_bytes(body)
        with pytest.raises(RecordError, match="damaged") as caught:
            find_record(folder, "a1")
        assert caught.value.code == DAMAGED, what
        assert find_record(folder, "same").id == "a2", "others are found beside a damaged one"
    for wanted in ("nothing", "../a0", "", "a0.json"):
        with pytest.raises(RecordError, match="no record of") as caught:
            find_record(folder, wanted)
        assert caught.value.code == UNKNOWN
    path.write_bytes(encode_record(msgspec.structs.replace(make_record("a1"), format=9)))
    with pytest.raises(RecordError, match="format 9"):
        find_record(folder, "a1")
