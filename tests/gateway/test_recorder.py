"""Answers are recorded whole, across rescues, within bounds, and callers see nothing of it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import stat
import time
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
    RecordedRequest,
    RecordedSample,
    encode_record,
    find_record,
    float_bits,
    write_record,
)
from headrace.core.request import SamplingParams
from headrace.gateway.recorder import Recorder, prepare_folder
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


def name_of(number: int) -> str:
    return f"cmpl-{number:032x}"


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
        recorder.keep(make_record(name_of(number)))
    recorder.close()
    assert sorted(path.stem for path in folder.iterdir()) == [name_of(3), name_of(4), name_of(5)]
    size = (folder / f"{name_of(3)}.json").stat().st_size
    recorder = Recorder(folder, max_answers=100, max_bytes=2 * size, log=log)
    recorder.keep(make_record(name_of(6)))
    recorder.keep(make_record("b" * 200 * 1000))
    recorder.close()
    assert sorted(path.stem for path in folder.iterdir()) == [name_of(5), name_of(6)]


def test_files_of_others_stay(folder: Path, tmp_path: Path) -> None:
    """Whatever they are called, and however old and large they are; and they take no record's place."""
    folder.mkdir()
    (folder / "dataset.json").write_bytes(bytes(100_000))
    (folder / "notes.txt").write_text("mine")
    (folder / f"chat{name_of(90)}.json").write_text('{"id": "an answer that its caller kept"}')
    (folder / f"{name_of(91)}.json").mkdir()
    os.mkfifo(folder / f"{name_of(92)}.json")
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(encode_record(make_record(name_of(93))))
    (folder / f"{name_of(93)}.json").symlink_to(elsewhere)
    copy = folder / "copy.json"  # a record that somebody put aside
    copy.write_bytes(elsewhere.read_bytes())
    for path in folder.iterdir():
        os.utime(path, (1, 1), follow_symlinks=False)
    theirs = sorted(path.name for path in folder.iterdir())
    recorder = Recorder(folder, max_answers=2, max_bytes=10_000, log=logging.getLogger("headrace.test"))
    for number in range(4):
        recorder.keep(make_record(name_of(number)))
    recorder.close()
    ours = [f"{name_of(number)}.json" for number in (2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*theirs, *ours])
    assert elsewhere.is_file()


def test_a_name_that_becomes_another_file(folder: Path) -> None:
    """A file that was a record, and is somebody's by the time that it would be dropped."""
    recorder = Recorder(folder, max_answers=1, max_bytes=10_000, log=logging.getLogger("headrace.test"))
    recorder.keep(make_record(name_of(0)))
    first = folder / f"{name_of(0)}.json"
    deadline = time.monotonic() + 10
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.write_text("mine")
    recorder.keep(make_record(name_of(1)))
    recorder.close()
    assert first.read_text() == "mine"


def test_what_is_known_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    cases = {
        tmp_path / "file": "it is no folder",
        tmp_path / "dangling": "it is no folder",
        tmp_path / "file" / "below": "Not a directory",
        Path("/proc/self/task"): "",  # where nobody can write
    }
    for path, reason in cases.items():
        with pytest.raises(UsageError, match=f"--record {path}: cannot be written: {reason}"):
            prepare_folder(path)
    assert (tmp_path / "file").read_text() == "" and not (tmp_path / "nowhere").exists()
    with small_files(100), pytest.raises(UsageError, match="File too large"):
        prepare_folder(tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []
    (tmp_path / "made").mkdir()
    prepare_folder(tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file can become larger meanwhile: a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_while_serving(
    stack: Stack, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_files(100):
        answers = [chat(stack, max_tokens=50, stream=number == 1) for number in range(3)]
        stack.wait_for(lambda: "is not recorded" in caplog.text, "a word about it")
    assert [answer.status for answer in answers] == [200] * 3
    assert caplog.text.count("is not recorded") == 1
    assert f"{folder}: File too large" in caplog.text
    answer = chat(stack, max_tokens=50)
    recorded(stack, folder, answer.json["id"])
    assert not [path for path in folder.iterdir() if path.suffix != ".json"], "nothing half written is left"


@pytest.mark.parametrize("by", ["nothing", "a file"])
def test_a_folder_that_is_replaced_while_serving(
    stack: Stack, folder: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    recorded(stack, folder, chat(stack, max_tokens=50).json["id"])
    shutil.rmtree(folder)
    if by == "a file":
        folder.write_text("mine")
    answers = [chat(stack, max_tokens=50, stream=number == 1) for number in range(3)]
    stack.wait_for(lambda: "is not recorded" in caplog.text, "a word about it")
    assert [answer.status for answer in answers] == [200] * 3
    if by == "a file":
        assert folder.read_text() == "mine"
        folder.unlink()
    folder.mkdir()
    answer = chat(stack, max_tokens=50)
    recorded(stack, folder, answer.json["id"])
    assert caplog.text.count("is not recorded") == 1
    reason = "Not a directory" if by == "a file" else "No such file or directory"
    assert f"{folder}: {reason}" in caplog.text


def test_a_gateway_that_starts_again_serves(
    tokenizer: Tokenizer, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever has become of the folder since the server started."""
    folder.write_text("mine")
    config = GatewayConfig(port=0, shutdown_grace_s=0.5, record=str(folder))
    with Stack(tokenizer, tmp_path, config) as stack:
        stack.replica.origin = ORIGIN
        stack.answer(TEXT)
        assert chat(stack, max_tokens=50).status == 200
        assert folder.read_text() == "mine"
        folder.unlink()
        folder.mkdir()
        recorded(stack, folder, chat(stack, max_tokens=50).json["id"])
    assert caplog.text.count("not recorded") == 1 and "it is no folder" in caplog.text


def test_an_answer_that_ends_after_the_recorder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(folder, max_answers=1, max_bytes=1000, log=logging.getLogger("headrace.test"))
    recorder.close()
    recorder.keep(make_record(name_of(0)))
    assert "ended too late" in caplog.text and list(folder.iterdir()) == []


def test_a_folder_that_fails(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        with pytest.raises(
            RecordError, match=r"no record of.*2 records, and 1 files .*, a1\.json first"
        ) as caught:
            find_record(folder, wanted)
        assert caught.value.code == UNKNOWN
    path.write_bytes(encode_record(msgspec.structs.replace(make_record("a1"), format=9)))
    with pytest.raises(RecordError, match="format 9"):
        find_record(folder, "a1")
    path.unlink()
    path.symlink_to(folder / "nowhere")
    with pytest.raises(RecordError, match=r"a1\.json cannot be read: No such file"):
        find_record(folder, "a1")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match=r"a1\.json cannot be read: it is no regular file"):
        find_record(folder, "a1")
    assert find_record(folder, "same").id == "a2", "beside a pipe too"


def forged(**fields: object) -> AnswerRecord:
    """A record with a digest that holds, and one thing in it that no answer has."""
    of_sample = {"token_ids": [1, 2], "logprob_bits": [3, 4], "finish_reason": "length", "origins": [ORIGIN]}
    of_request = {"request_id": "r", "prompt": [1], "sampling": SamplingParams(seed=1)}
    samples = fields.pop("samples", 1)
    for known in (of_sample, of_request):
        known.update({name: fields.pop(name) for name in list(fields) if name in known})
    sample = msgspec.convert(of_sample, RecordedSample)
    request = msgspec.convert({**of_request, "samples": [sample] * samples}, RecordedRequest)  # type: ignore[operator]
    return msgspec.structs.replace(make_record("a"), requests=[request], **fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprob_bits": [3]}, "sample 0 has 2 tokens and 1 log-probabilities"),
        ({"logprob_bits": [3, 2**32]}, "a log-probability of sample 0 is 4294967296"),
        ({"logprob_bits": [-1, 3]}, "a log-probability of sample 0 is -1"),
        ({"token_ids": [1, 2**40]}, "a token of sample 0 is 1099511627776"),
        ({"prompt": [1, -7]}, "a token of the prompt is -7"),
        ({"prompt": [2**40]}, "a token of the prompt is 1099511627776"),
        ({"prompt": []}, "the prompt of 'r' is empty"),
        ({"samples": 0}, "n is 1, samples are 0"),
        ({"samples": 2}, "n is 1, samples are 2"),
        ({"sampling": SamplingParams(temperature=-3)}, "temperature must be in"),
        ({"sampling": SamplingParams(seed=2**63)}, "seed must be in"),
        ({"max_model_len": -5}, "max_model_len must be at least 0, is -5"),
        ({"num_rescues": -1}, "num_rescues must be at least 0, is -1"),
    ],
)
def test_forged_records_are_refused(tmp_path: Path, fields: dict[str, object], reason: str) -> None:
    write_record(tmp_path, "a", encode_record(forged()))
    assert find_record(tmp_path, "a") == forged()
    write_record(tmp_path, "a", encode_record(forged(**fields)))
    with pytest.raises(RecordError, match="is damaged: ") as caught:
        find_record(tmp_path, "a")
    assert reason in caught.value.message and caught.value.code == DAMAGED
