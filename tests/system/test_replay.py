"""Answers that a server recorded, replayed to the bit: one at a time on stock operators, and of a busy fleet
whose replica is killed under them.

Contract: exact; the latter by the kernels that ship, in bfloat16.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.core.errors import CompilerMissingError, RecordError
from headrace.core.knobs import EngineConfig
from headrace.core.packs import KernelEntry, PackConditions
from headrace.core.recording import AnswerRecord, find_record
from headrace.engine.engine import Engine
from headrace.engine.replay import check_origin, replay
from headrace.kernels.native.build import find_compiler
from headrace.models.resolve import resolve_model
from headrace.optimize.digest import candidate_digest
from headrace.optimize.keys import Keys
from headrace.optimize.packing import Winner, make_pack
from headrace.optimize.records import Measurement, Ratio, Target, Verdict
from tests.packs import pack as cpu_pack
from tests.system.home import Home
from tests.system.server import COMMAND, Server
from tests.system.streams import CHAT, TEXT, Stream, check_complete, run, until
from tests.system.tiny import write_model

LENGTH, MAX_LEN = 80, 400


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with Home() as made:
        yield made


@pytest.fixture(scope="module")
def environment(home: Home) -> dict[str, str]:
    """The cache is the user's: kernels are built once for all tests."""
    return {
        **home.environment,
        "XDG_CONFIG_HOME": str(home.path / "config"),
        "XDG_DATA_HOME": str(home.path / "data"),
    }


def signed_pack(home: Home) -> Path:
    """The kernels in packs/cpu; the evidence is invented, the key is this home's."""
    plain = cpu_pack.write_pack(home.path / "plain")
    manifest = msgspec.json.decode((plain / "pack.json").read_bytes())
    ratio = Ratio(median=2.0, low=1.9, high=2.1, pairs=9, baseline_s=2.0, candidate_s=1.0)
    winners = []
    for fields in manifest["kernels"]:
        entry = msgspec.convert(fields, KernelEntry)
        candidate = home.path / f"{entry.op}-candidate"
        candidate.mkdir()
        for path in (*plain.glob("*.h"), plain / entry.source):
            shutil.copyfile(path, candidate / path.name)
        (candidate / "kernel.json").write_bytes(msgspec.json.encode(entry))
        digest = candidate_digest(candidate)
        target = Target(
            op=entry.op,
            model="tiny",
            phase="decode",
            weight_dtype="bfloat16",
            activation_dtypes=["float32"],
            max_rows=64,
            shapes=[],
            dims={},
            floats={},
            present=[],
            layers=1,
            baseline_s=1.0,
            end_to_end_gain=2.0,
            why="a test",
        )
        verdict = Verdict(
            candidate="a", digest=digest, passed=True, reason="ok", detail="", seconds=1.0, sandbox="none"
        )
        measurement = Measurement(
            candidate="a",
            digest=digest,
            alone={"decode/1": ratio},
            end_to_end={"decode_tok_s": ratio},
            agreement="",
            won=True,
            detail="",
        )
        winners.append(Winner(candidate, entry, target, verdict, measurement, "a test"))
    folder = home.path / "pack"
    folder.mkdir()
    make_pack(
        folder,
        *winners,
        name="cpu",
        conditions=PackConditions(shapes={"hidden_size": 64}),  # of write_model's model
        round_id="r",
        keys=Keys(home.path / "config" / "headrace" / "keys"),
    )
    return folder


def streams() -> list[Stream]:
    """Greedy and sampled, some with seeds of their own, some with what the gateway draws."""
    bodies = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": 5, "n": 2},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.5},
    ]
    sent = []
    for number in range(16):
        body = {"max_tokens": LENGTH, "ignore_eos": True, **bodies[number % len(bodies)]}
        text = f"request {number}: the capital " * (1 + number % 5)
        if number % 2:
            stream = Stream(CHAT, {**body, "messages": [{"role": "user", "content": text}]})
        else:
            stream = Stream(TEXT, {**body, "prompt": text})
        stream.request_id = f"mine-{number}"
        sent.append(stream)
    return sent


def test_one_at_a_time_on_stock_operators(home: Home, environment: dict[str, str]) -> None:
    """Through either of two gateways; nothing is recorded that was not asked for, and nothing of it shown."""
    answers, model = home.path / "plain-answers", write_model(home.path / "plain-model", max_len=MAX_LEN)
    flags = (
        *("--pack", "none", "--dtype", "float32", "--record", str(answers), "--gateways", "2"),
        *("--threads", "1", "--kv-cache-gib", "0.05", "--no-enable-prefix-caching"),
        *("--served-model-name", "tiny"),
    )
    sent = streams()[:4]
    with Server(str(model), *flags, environment=environment) as server:
        assert "kernels: stock operators, as --pack none asks for" in server.log
        for stream in sent:
            run(server.url, [stream])
        check_complete(sent)
        assert server.stop() == 0, server.log
    assert not any(choice.logprobs for stream in sent for choice in stream.choices.values())
    records = [find_record(answers, stream.request_id) for stream in sent]
    assert len(list(answers.glob("*.json"))) == 4
    resolved = resolve_model(records[0].source)
    config = EngineConfig(
        dtype="float32", pack="none", threads=1, max_model_len=MAX_LEN, enable_prefix_caching=False
    )
    engine = Engine(config, resolved.folder, revision=resolved.revision)
    for record in records:
        check_origin(engine, record)
        assert replay(engine, record) is None, record.id


def test_answers_of_a_killed_replica_are_replayed(home: Home, environment: dict[str, str]) -> None:
    if len(cpu_pack.OPS) < 3:
        pytest.skip("packs/cpu is not whole")
    try:
        find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))
    folder, answers = signed_pack(home), home.path / "answers"
    model = write_model(home.path / "tiny", max_len=MAX_LEN, dtype=torch.bfloat16)
    flags = (
        *("--pack", str(folder), "--record", str(answers), "--replicas", "2", "--threads", "1"),
        *("--max-num-batched-tokens", "48", "--kv-cache-gib", "0.05", "--served-model-name", "tiny"),
    )
    sent = streams()
    with Server(str(model), *flags, environment=environment) as server:
        assert "the same bits in any batch" in server.log

        async def kill() -> None:
            await until(lambda: all(stream.num_events >= 3 for stream in sent), "every stream has begun")
            os.kill(server.pids("headrace.replica")[0], signal.SIGKILL)

        run(server.url, sent, kill)
        check_complete(sent)
        assert server.stop() == 0, server.log
    records = [find_record(answers, stream.request_id) for stream in sent]
    assert sum(record.num_rescues for record in records) > 0
    first = records[0]
    resolved = resolve_model(first.source)
    config = EngineConfig(pack=str(folder), max_model_len=first.max_model_len, max_num_seqs=2, threads=2)
    engine = Engine(config, resolved.folder, revision=resolved.revision)
    for record in records:
        check_origin(engine, record)
        assert replay(engine, record) is None, record.id
    rescued = next(record for record in records if record.num_rescues)
    say(home, rescued, environment)
    with pytest.raises(RecordError):
        find_record(answers, "mine-99")


def say(home: Home, record: AnswerRecord, environment: dict[str, str]) -> None:
    """The command says so too."""
    flags = ("--record", str(home.path / "answers"), "--pack", str(home.path / "pack"))
    done = subprocess.run(
        [*COMMAND, "replay", record.caller_id, *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"same bits: {record.id}: ")
