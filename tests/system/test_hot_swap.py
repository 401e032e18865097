"""Packs of native kernels reach a running server, or are taken back, and no stream notices.

Contract: exact (float32). The kernel is an output head in plain C++; other versions of it are slower, or
wrong now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.core.control import (
    PACK_REFUSED,
    PACK_ROLLED_BACK,
    Done,
    FromServer,
    Progress,
    Refusal,
    Rollback,
    Rollout,
)
from headrace.core.errors import CompilerMissingError
from headrace.core.packs import KernelEntry, PackConditions
from headrace.kernels.native.build import find_compiler
from headrace.kernels.native.build_cache import build_pack
from headrace.kernels.native.pack import read_manifest
from headrace.optimize.digest import candidate_digest
from headrace.optimize.keys import Keys
from headrace.optimize.packing import Winner, make_pack, pack_id
from headrace.optimize.records import Measurement, Ratio, Target, Verdict
from tests.system.home import Home
from tests.system.server import Server
from tests.system.streams import TEXT, Stream, check_complete, check_same, run, until
from tests.system.tiny import write_model

NUM_STREAMS, LENGTH, MAX_LEN = 50, 250, 400
SHAPES = {"hidden_size": 64}  # of write_model's model, which the packs are for

HEAD = """
#include <cmath>
#include "headrace_kernel.h"
enum { X, WEIGHT, BIAS, OUT };
static long seen = 0;

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &x = call->tensors[X], &w = call->tensors[WEIGHT], &y = call->tensors[OUT];
    if (call->tensors[BIAS].data || x.dtype != HR_F32 || w.dtype != HR_F32) return HR_NOT_MINE;
    const long rows = x.shape[0], width = w.shape[1];
    static float turned[8 * 4096];
    if (width > 4096) return HR_NOT_MINE;
    for (long first = 0; first < rows; first += 8) {
        const long count = rows - first < 8 ? rows - first : 8;
        for (long k = 0; k < width; k++)
            for (long r = 0; r < 8; r++)
                turned[8 * k + r] = r < count ? ((const float *)x.data)[(first + r) * x.stride[0] + k] : 0;
        for (long i = 0; i < w.shape[0]; i++) {
            const float *weight = (const float *)w.data + i * w.stride[0];
            float sum[8] = {};
            for (long k = 0; k < width; k++)
                for (long r = 0; r < 8; r++) sum[r] += turned[8 * k + r] * weight[k];
            for (long r = 0; r < count; r++) ((float *)y.data)[(first + r) * y.stride[0] + i] = sum[r];
        }
    }
    for (long row = 0; row < rows; row++) {
        float *out = (float *)y.data + row * y.stride[0];
        long best = 0;
        for (long i = 1; i < w.shape[0]; i++)
            if (out[i] > out[best]) best = i;
        seen++;
        EXTRA
    }
    return HR_DONE;
}
"""
FAST = ""
SLOW = "volatile double x = 1; for (int i = 0; i < 150000; i++) x = std::sqrt(x + i);"
WRONG = "if (seen % 100 == 0) out[best] += 0.05f;"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    try:
        find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))
    with Home() as made:
        yield made


@pytest.fixture(scope="module")
def server(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # so many layers that what a head costs more than stock's does not count as slower
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = write_model(folder, max_len=MAX_LEN, num_hidden_layers=24)
    environment = {
        **home.environment,
        "XDG_CONFIG_HOME": str(home.path / "config"),
        "XDG_CACHE_HOME": str(home.path / "cache"),
    }
    flags = (
        *("--dtype", "float32", "--max-num-seqs", "64", "--kv-cache-gib", "0.3", "--threads", "1"),
        *("--served-model-name", "tiny"),
    )
    with Server(str(model), *flags, environment=environment) as made:
        yield made


def greedy(server: Server, count: int, length: int) -> list[Stream]:
    """Streams of a server that nothing happens to."""
    body = {"temperature": 0, "max_tokens": length, "ignore_eos": True}
    streams = [Stream(TEXT, {**body, "prompt": f"request {i}: the capital"}) for i in range(count)]
    run(server.url, streams)
    check_complete(streams)
    return streams


def make(home: Home, name: str, extra: str) -> Path:
    """A pack whose evidence is invented and whose signature is the server's own judge's."""
    candidate = home.path / f"{name}-candidate"
    candidate.mkdir()
    entry = KernelEntry(
        op="logits_head",
        source="head.cpp",
        phases=["decode", "prefill"],
        max_rows=64,
        activation_dtypes=["float32"],
        weight_formats=["float32"],
    )
    (candidate / "head.cpp").write_text(HEAD.replace("EXTRA", extra))
    (candidate / "kernel.json").write_bytes(msgspec.json.encode(entry))
    digest = candidate_digest(candidate)
    ratio = Ratio(median=2.0, low=1.9, high=2.1, pairs=9, baseline_s=2.0, candidate_s=1.0)
    winner = Winner(
        folder=candidate,
        entry=entry,
        target=Target(
            op="logits_head",
            model="tiny",
            phase="decode",
            weight_dtype="float32",
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
        ),
        verdict=Verdict(
            candidate=name, digest=digest, passed=True, reason="ok", detail="", seconds=1.0, sandbox="none"
        ),
        measurement=Measurement(
            candidate=name,
            digest=digest,
            alone={"decode/1": ratio},
            end_to_end={"decode_tok_s": ratio},
            agreement="",
            won=True,
            detail="",
        ),
        author="a test",
    )
    folder = home.path / name
    folder.mkdir()
    keys = Keys(home.path / "config" / "headrace" / "keys")
    conditions = PackConditions(dtype="float32", shapes=SHAPES)
    make_pack(folder, winner, name=name, conditions=conditions, round_id="r", keys=keys)
    return folder


def roll_out(server: Server, folder: Path) -> tuple[list[str], FromServer]:
    """Lines of progress, and the last word."""
    *progress, last = server.tell(Rollout(str(folder), "a test"))
    return [reply.line for reply in progress if isinstance(reply, Progress)], last


def packs(server: Server) -> list[str]:
    return [replica.get("pack", "") for replica in server.replicas().values()]


def test_50_greedy_streams_outlive_a_swap(server: Server, home: Home) -> None:
    folder = make(home, "fast", FAST)
    # a compiler beside 50 streams takes its time
    build_pack(folder, read_manifest(folder)[0], home.path / "cache" / "headrace" / "kernels")
    reference = greedy(server, NUM_STREAMS, LENGTH)
    streams = [stream.again() for stream in reference]
    over = False

    async def swap() -> None:
        nonlocal over
        try:
            await until(lambda: all(stream.num_events >= 2 for stream in streams), "every stream has begun")
            lines, last = await asyncio.to_thread(roll_out, server, folder)
        finally:
            over = True
        assert isinstance(last, Done), (last, lines)
        assert any("recorded" in line for line in lines), lines
        assert any("live steps take" in line for line in lines), lines

    sent = run(server.url, streams, swap, again_while=lambda: not over)
    check_complete(sent)
    wanted = {stream.body["prompt"]: stream for stream in reference}
    check_same(sent, [wanted[stream.body["prompt"]] for stream in sent])
    assert packs(server) == [pack_id(folder)]
    shown = server.command("ps").stdout
    assert pack_id(folder)[:12] in shown
    (back,) = server.tell(Rollback("a test"))[-1:]
    assert isinstance(back, Done) and packs(server) == [""]


@pytest.mark.parametrize(("name", "extra"), [("slow", SLOW), ("wrong", WRONG)], ids=["slow", "wrong"])
def test_a_canary_that_slips_is_taken_back(server: Server, home: Home, name: str, extra: str) -> None:
    reference = greedy(server, 3, 100)
    lines, last = roll_out(server, make(home, name, extra))
    words = {"slow": "is slower", "wrong": "is wrong"}[name]
    assert isinstance(last, Refusal) and words in last.failed.message, (last, lines)
    assert last.failed.code == PACK_ROLLED_BACK
    assert packs(server) == [""]
    streams = [stream.again() for stream in reference]
    run(server.url, streams)
    check_complete(streams)
    check_same(streams, reference)


def test_what_is_not_as_it_was_signed_is_refused(server: Server, home: Home) -> None:
    folder = make(home, "edited", FAST)
    source = next(folder.rglob("head.cpp"))
    source.write_text(source.read_text() + "// and more\n")
    _, last = roll_out(server, folder)
    assert isinstance(last, Refusal) and last.failed.code == PACK_REFUSED, last
    assert packs(server) == [""]


def test_a_server_starts_with_a_pack(home: Home, server: Server, tmp_path: Path) -> None:
    folder = make(home, "first", FAST)
    model = write_model(tmp_path / "tiny")
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.05", "--threads", "1", "--pack", str(folder))
    with Server(str(model), *flags, environment=server.environment) as other:
        assert packs(other) == [pack_id(folder)]
        assert f"kernels: pack {pack_id(folder)[:12]} (logits_head)" in other.log
    (folder / "signature.json").unlink()
    refused = Server(str(model), *flags, environment=server.environment)
    assert refused.process.wait(timeout=60) == 1 and refused.stop() == 1
    assert "signature.json is missing" in refused.log
