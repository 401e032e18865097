"""headrace replay: what it says, how it exits, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.main import main
from headrace.core.knobs import EngineConfig
from headrace.core.recording import AnswerRecord, encode_record, write_record
from headrace.engine.engine import Engine
from headrace.models.resolve import resolve_model
from tests.engine.harness import make_request
from tests.engine.test_same_bits import changed_origin, record_of
from tests.models.tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def made(model: Path) -> AnswerRecord:
    """Of an engine that served nothing else: stock operators then give the same bits once more."""
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, pack="none", max_model_len=64, kv_cache_gib=0.02
    )
    resolved = resolve_model(str(model))
    engine = Engine(config, resolved.folder, revision=resolved.revision)
    request = make_request("cmpl-1", [5, 6, 7, 8, 9], max_tokens=6, temperature=1.0, seed=3)
    return msgspec.structs.replace(record_of(engine, [request]), source=str(model), max_model_len=64)


@pytest.fixture
def folder(tmp_path: Path, made: AnswerRecord) -> Path:
    keep(tmp_path, made)
    return tmp_path


def keep(folder: Path, record: AnswerRecord) -> None:
    write_record(folder, record.id, encode_record(record))


Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Replay:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))

    def run(wanted: str = "cmpl-1", *flags: str) -> tuple[int, str, str]:
        code = main(["replay", wanted, "--record", str(folder), "--threads", "1", *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def change(made: AnswerRecord, **fields: Any) -> AnswerRecord:
    (request,) = made.requests
    (sample,) = request.samples
    sample = msgspec.structs.replace(sample, **fields)
    return msgspec.structs.replace(made, requests=[msgspec.structs.replace(request, samples=[sample])])


def test_the_same_bits(replay: Replay) -> None:
    code, out, err = replay()
    assert (code, out) == (0, "same bits: cmpl-1: 6 tokens of 1 sample\n")
    assert "stock operators does not promise the same bits in other batches" in err
    assert replay("mine")[0] == 0, "by the id of the request"


def test_the_first_difference(replay: Replay, made: AnswerRecord, folder: Path) -> None:
    (sample,) = made.requests[0].samples
    bits = [*sample.logprob_bits]
    bits[4] ^= 1
    keep(folder, change(made, logprob_bits=bits))
    code, out, _ = replay()
    assert code == 1
    assert out.startswith("differs: cmpl-1: 6 tokens of 1 sample\nfirst at cmpl-1, sample 0, token 4: ")
    assert "the same token" in out and f"0x{bits[4]:08x}" in out and f"0x{bits[4] ^ 1:08x}" in out


def test_unknown_and_damaged(replay: Replay, folder: Path) -> None:
    code, out, err = replay("cmpl-2")
    assert (code, out) == (1, "") and "no record of 'cmpl-2'" in err and "hint: " in err
    path = folder / "cmpl-1.json"
    path.write_bytes(path.read_bytes()[:-9])
    code, out, err = replay()
    assert (code, out) == (1, "") and f"error: {path} is damaged" in err


def test_another_model(replay: Replay, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other", seed=1)
    code, out, err = replay("cmpl-1", "--model", str(other))
    assert (code, out) == (1, "") and "the record is of a model with revision" in err and "--model" in err


def test_another_pack(replay: Replay, made: AnswerRecord, folder: Path) -> None:
    origin = msgspec.structs.replace(made.origins[0], pack="f" * 64)
    keep(folder, changed_origin(made, origin))
    code, out, err = replay()
    assert (code, out) == (1, "")
    assert "was made with pack ffffffffffff, which does not ship" in err and "--pack" in err
    code, _, err = replay("cmpl-1", "--pack", str(folder))
    assert code == 1 and "pack.json is missing" in err, "no pack is trusted without a signature"
    (request,) = made.requests
    (sample,) = request.samples
    sample = msgspec.structs.replace(sample, origins=[made.origins[0], origin])
    mixed = msgspec.structs.replace(made, requests=[msgspec.structs.replace(request, samples=[sample])])
    keep(folder, mixed)
    code, _, err = replay()
    assert code == 1 and "(stock operators and ffffffffffff), exchanged under it" in err


def test_wrong_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_RECORD", raising=False)
    assert main(["replay", "cmpl-1"]) == 2
    assert main(["replay", "cmpl-1", "--record", "/nowhere", "--threads", "0"]) == 2
    assert main(["replay", "cmpl-1", "--record", "/nowhere", "--pack", ""]) == 2
    assert "--pack needs a folder" in capsys.readouterr().err
    assert main(["replay", "cmpl-1", "--record", "/nowhere"]) == 1
    assert "the folder of records /nowhere cannot be read: No such file" in capsys.readouterr().err
    assert main(["replay", "cmpl-1", "--record", __file__]) == 1
    assert "Not a directory" in capsys.readouterr().err
    for command in (["run", "m", "hi"], ["serve", "m"]):
        assert main([*command, "--pack", ""]) == 2
        assert "--pack: expected" in capsys.readouterr().err
    assert main(["serve", "m", "--record", ""]) == 2
    assert "--record: expected" in capsys.readouterr().err
    assert main(["serve", "m", "--record", __file__, "--port", "0"]) == 2
    assert "cannot be written: it is no folder" in capsys.readouterr().err


def test_pipes_are_not_waited_for(replay: Replay, made: AnswerRecord, folder: Path) -> None:
    os.mkfifo(folder / "another.json")
    assert replay("mine")[0] == 0
    pack = folder / "pack"
    pack.mkdir()
    os.mkfifo(pack / "pack.json")
    code, _, err = replay("mine", "--pack", str(pack))
    assert code == 1 and "it is no regular file" in err


@pytest.mark.parametrize(("name", "value"), [("quantization", "zzz"), ("dtype", "float16")])
def test_settings_that_no_engine_has(
    replay: Replay, made: AnswerRecord, folder: Path, name: str, value: str
) -> None:
    origin = msgspec.structs.replace(made.origins[0], **{name: value})
    keep(folder, changed_origin(made, origin))
    code, out, err = replay()
    assert (code, out) == (1, "") and value in err and f"$.{name}" in err


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {10**6: 1.0}},
        {"stop_token_ids": [10**6]},
        {"seed": None},
        {"min_tokens": 10**6, "max_tokens": None},
        {"max_tokens": 2**70},
        {"top_k": 2**70},
    ],
)
def test_sampling_that_no_gateway_lets_pass(
    replay: Replay, made: AnswerRecord, folder: Path, fields: dict[str, Any]
) -> None:
    """It is refused in words, or computed; it never ends in a traceback."""
    (request,) = made.requests
    request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **fields))
    keep(folder, msgspec.structs.replace(made, requests=[request]))
    code, out, err = replay()
    assert out.startswith(("same bits", "differs")) or (code == 1 and "error: " in err)
