"""Engines that fill from another engine, or from disk: the same tokens as an engine that computes all.

Exact, in float32. The other engine is in the same process: its ``Prefiller`` is driven without a connector.
"""

from __future__ import annotations

import errno
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import UsageError
from headrace.core.identity import block_identities
from headrace.core.messages import BlocksRemoved, BlocksStored, Timing
from headrace.core.request import Request
from headrace.engine.engine import Engine
from headrace.kvcache.connector import SendJob
from headrace.kvcache.source import FillJob, FillSink
from headrace.models.decoder import Decoder
from tests.engine.harness import Result, make_engine, make_request, run

FAMILIES = ["llama", "gemma2", "qwen3"]


class PeerStream:
    """What a peer sends goes straight into the sink, with room for a few blocks."""

    def __init__(self, sink: FillSink, room: int) -> None:
        self.sink = sink
        self.num_free = room
        self.is_over = False

    def room(self) -> int:
        return self.num_free

    def send(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        self.num_free -= 1
        if not self.is_over:
            self.sink.deliver(index, block_id, payload)

    def computed(self) -> None:
        self.sink.computed()

    def end(self, reason: str = "") -> None:
        if not self.is_over:
            self.is_over = True
            self.sink.ended(reason)


class Peer:
    """A ``BlockSource`` whose blocks another engine computes."""

    def __init__(self, engine: Engine, room: int = 3) -> None:
        self.engine = engine
        self.is_dead = False
        self._room = room
        self._streams: dict[str, PeerStream] = {}

    def open(self, job: FillJob, sink: FillSink) -> None:
        if self.is_dead:
            sink.ended("nobody listens there")
            return
        stream = self._streams[job.job_id] = PeerStream(sink, self._room)
        self.engine.prefiller.start(SendJob(job.job_id, job.tokens, job.first), stream)

    def consumed(self, job_id: str, num_blocks: int) -> None:
        if job_id in self._streams:
            self._streams[job_id].num_free += num_blocks
            self.engine.prefiller.room(job_id)

    def cancel(self, job_id: str) -> None:
        if job_id in self._streams:
            self._streams[job_id].is_over = True
            self.engine.prefiller.cancel(job_id)

    def die(self) -> None:
        """Goes away in the middle of everything."""
        self.is_dead = True
        for job_id, stream in self._streams.items():
            stream.end("connection lost")
            self.engine.prefiller.cancel(job_id)


def remote(request: Request) -> Request:
    return msgspec.structs.replace(request, prefill_from="unix:/peer")


def run_split(
    engine: Engine, peer: Peer, requests: list[Request], rng: random.Random, *, dies_after: float = math.inf
) -> dict[tuple[str, int], Result]:
    """Runs requests on ``engine``; the peer's engine takes its steps at random moments in between."""
    results: dict[tuple[str, int], Result] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        if not waiting and 0.0 not in (engine.wait_s(), peer.engine.wait_s()):
            time.sleep(0.0005)  # blocks are on their way
        if peer.engine.prefiller.num_sent_blocks >= dies_after and not peer.is_dead:
            peer.die()
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop(0))
        for one in rng.sample([engine, peer.engine], 2):
            if one.wait_s() == 0.0 and rng.random() < 0.8:
                step = one.step()
                assert step.failed == []
                for output in step.outputs:
                    results.setdefault((output.request_id, output.sample_index), Result()).take(output)
                one.check_integrity()
    while peer.engine.has_work:
        peer.engine.step()
    for one in (engine, peer.engine):
        one.check_integrity()
        assert one.stats().num_free_blocks == one.stats().num_blocks
    return results


def mixed_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts of shared beginnings, greedy and drawn, some with several samples."""
    texts = [[rng.randrange(2, 300) for _ in range(50)] for _ in range(4)]
    requests = []
    for number in range(count):
        text = rng.choice(texts)
        prompt = text[: rng.randrange(1, 50)] + [rng.randrange(2, 300) for _ in range(rng.randrange(3))]
        params: dict[str, Any] = {"max_tokens": rng.randrange(1, 12), "seed": number}
        if rng.random() < 0.5:
            params |= {"temperature": 1.0, "n": rng.choice([1, 1, 3]), "presence_penalty": 0.5}
        if rng.random() < 0.1:
            params["prompt_logprobs"] = 0
        requests.append(make_request(f"r{number}", prompt, **params))
    return requests


def tokens_of(results: dict[tuple[str, int], Result]) -> dict[tuple[str, int], tuple[list[int], Any]]:
    return {key: (result.tokens, result.finish_reason) for key, result in results.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_another_engine_computed_gives_the_same_tokens(tiny: Callable[..., Path], family: str) -> None:
    rng = random.Random(family)
    requests = mixed_requests(rng, 24)
    expected = run(make_engine(tiny(family)), requests)
    engine = make_engine(tiny(family), num_blocks=40)
    peer = Peer(make_engine(tiny(family), num_blocks=36))
    engine.moves.use_remote(peer)
    found = run_split(engine, peer, [remote(r) for r in requests], rng)
    assert tokens_of(found) == tokens_of(expected)
    moves, sent = engine.stats().moves, peer.engine.stats().moves
    assert moves is not None and sent is not None
    assert moves.fetched_blocks > 20 and moves.fetched_bytes == moves.fetched_blocks * engine.kv_block_bytes
    assert sent.sent_blocks >= moves.fetched_blocks and moves.num_filling == 0
    assert moves.failed_fetches == moves.damaged_blocks == 0
    assert 0.0 < moves.fetch_overlap_s <= moves.fetch_s


@pytest.mark.parametrize("dies_after", [0, 3, 15, 30])
def test_a_prefill_side_that_dies_costs_no_token(tiny: Callable[..., Path], dies_after: int) -> None:
    rng = random.Random(dies_after)
    requests = mixed_requests(rng, 24)
    expected = run(make_engine(tiny("llama")), requests)
    engine = make_engine(tiny("llama"), num_blocks=40)
    peer = Peer(make_engine(tiny("llama"), num_blocks=36))
    engine.moves.use_remote(peer)
    found = run_split(engine, peer, [remote(r) for r in requests], rng, dies_after=dies_after)
    assert tokens_of(found) == tokens_of(expected)
    moves = engine.stats().moves
    assert moves is not None and moves.failed_fetches > 0


def test_a_fetch_shows_in_the_timing_and_computes_nothing_but_the_tail(tiny: Callable[..., Path]) -> None:
    engine, other = make_engine(tiny("llama")), make_engine(tiny("llama"))
    engine.moves.use_remote(Peer(other, room=99))
    engine.add(remote(make_request("a", list(range(3, 45)), max_tokens=2)))
    assert engine.has_work and engine.wait_s() != 0.0 and other.wait_s() == 0.0
    while other.has_work or other.wait_s() == 0.0:
        other.step()
    assert engine.wait_s() == 0.0
    (output,) = engine.step().outputs
    assert isinstance(output.timing, Timing) and output.num_cached_tokens == 0
    timing = output.timing
    assert (timing.num_computed_tokens, timing.num_fetched_tokens, timing.num_disk_tokens) == (2, 40, 0)
    assert timing.fill_s > 0.0 and timing.queue_s < 1.0
    assert other.stats().generation_tokens == 0 and other.stats().computed_prompt_tokens == 40


def test_an_abort_while_filling_ends_the_work_on_both_sides(tiny: Callable[..., Path]) -> None:
    engine, other = make_engine(tiny("llama")), make_engine(tiny("llama"))
    engine.moves.use_remote(Peer(other))
    engine.add(remote(make_request("a", list(range(3, 45)), n=2)))
    other.step()
    while engine.stats().num_free_blocks == engine.stats().num_blocks:
        engine.step()
    assert engine.abort("a") == 2 and not engine.has_work
    other.step()
    for one in (engine, other):
        one.check_integrity()
        assert not one.has_work and one.stats().num_free_blocks == one.stats().num_blocks


def test_a_prompt_that_is_not_finite_fails_its_own_request_alone(tiny: Callable[..., Path]) -> None:
    engine, other = make_engine(tiny("llama"), num_blocks=20), make_engine(tiny("llama"), num_blocks=20)
    good = [make_request(str(i), [12 + i, 13, 14, 15, 16, 17]) for i in range(3)]
    expected = run(make_engine(tiny("llama")), good)
    for one in (engine, other):
        assert isinstance(one.runner.model, Decoder)
        one.runner.model._embedding[299] = math.nan
    peer = Peer(other)
    engine.moves.use_remote(peer)
    engine.add(remote(make_request("bad", [20, 21, 22, 299, *range(30, 70)])))
    failed = []
    while engine.has_work:
        other.step()
        failed += engine.step().failed
    assert [one.request_id for one in failed] == ["bad"]
    assert other.block_pool.num_cached == 0 and not other.has_work
    assert tokens_of(run_split(engine, peer, [remote(r) for r in good], random.Random(1))) == tokens_of(
        expected
    )


def test_a_prompt_of_other_replicas_is_checked_like_any(tiny: Callable[..., Path]) -> None:
    engine, other = make_engine(tiny("llama")), make_engine(tiny("llama"), max_model_len=32)
    engine.moves.use_remote(Peer(other))
    expected = run(make_engine(tiny("llama")), [make_request("a", list(range(3, 45)))])
    engine.add(remote(make_request("a", list(range(3, 45)))))
    results: dict[tuple[str, int], Result] = {}
    while engine.has_work:
        other.step()
        for output in engine.step().outputs:
            results.setdefault((output.request_id, 0), Result()).take(output)
    assert tokens_of(results) == tokens_of(expected)


def drain_to_disk(engine: Engine) -> None:
    """Idle steps until nothing is left to write, and the tier has written it."""
    while engine.wait_s() is not None:
        engine.step()
        assert engine.moves.disk is not None
        engine.moves.disk.flush(10.0)


def disk_engine(folder: Path, path: Path, **knobs: Any) -> Engine:
    """One that takes itself for so slow that reading always pays."""
    engine = make_engine(folder, kv_disk_gb=0.1, kv_disk_path=str(path), **knobs)
    engine.moves.prefill_rate.add(1.0, 1e6)
    return engine


def make_disk_engine(folder: Path, path: Path, num_blocks: int) -> Engine:
    """``make_engine`` sizes a pool by an engine that it throws away: here without a tier."""
    plain = make_engine(folder)
    gib = (num_blocks + 0.5) * plain.kv_block_bytes / 1024**3
    return disk_engine(folder, path, kv_cache_gib=gib)


def test_what_a_disk_that_takes_nothing_loses_at_the_end_is_told_with_the_reason(
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(fd: int, buffers: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", fail)
    engine = disk_engine(tiny("llama"), tmp_path / "kv")
    run(engine, [make_request("a", list(range(3, 60)))])
    drain_to_disk(engine)  # which finds out
    run(engine, [make_request("b", list(range(103, 160)))])
    engine.close()
    (last,) = [record.message for record in caplog.records if "not all cached" in record.message]
    assert os.strerror(errno.ENOSPC) in last


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_larger_than_memory_go_on_from_disk(
    tiny: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Six of them take turns in a pool that holds one; then again after a restart."""
    rng = random.Random(family)
    starts = [[rng.randrange(2, 300) for _ in range(20)] for _ in range(6)]
    plain = make_engine(tiny(family))

    def talk(engine: Engine) -> list[list[int]]:
        texts = [list(start) for start in starts]
        for turn in range(3):
            for number, text in enumerate(texts):
                request = make_request(f"{turn}/{number}", text, max_tokens=8)
                text += run(engine, [request])[request.request_id, 0].tokens
                if engine.moves.disk is not None:
                    drain_to_disk(engine)
        return texts

    expected = talk(plain)
    engine = make_disk_engine(tiny(family), tmp_path / "kv", 18)
    assert talk(engine) == expected
    moves = engine.stats().moves
    assert moves is not None and moves.disk_hit_blocks >= 6 * (5 + 7) - 8
    assert moves.disk_blocks > 18 and moves.disk_written_bytes > 0 and moves.damaged_blocks == 0
    computed = engine.stats().computed_prompt_tokens
    engine.close()
    again = make_disk_engine(tiny(family), tmp_path / "kv", 18)
    assert talk(again) == expected
    assert again.stats().computed_prompt_tokens < computed * 0.8
    again.close()


def test_a_damaged_file_is_recomputed_and_counted(tiny: Callable[..., Path], tmp_path: Path) -> None:
    prompt = list(range(3, 45))
    engine = disk_engine(tiny("llama"), tmp_path)
    expected = run(engine, [make_request("a", prompt)])
    engine.close()
    files = sorted((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    for path in [path for path in files if path.stat().st_size > engine.kv_block_bytes][::2]:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    again = disk_engine(tiny("llama"), tmp_path)
    assert tokens_of(run(again, [make_request("a", prompt)])) == tokens_of(expected)
    moves = again.stats().moves
    assert moves is not None and moves.damaged_blocks == 1
    again.close()


def test_what_is_on_disk_is_told_in_the_stream_of_events(tiny: Callable[..., Path], tmp_path: Path) -> None:
    engine = disk_engine(tiny("llama"), tmp_path)
    run(engine, [make_request("a", list(range(3, 45)), max_tokens=1)])
    first, events = engine.take_events()
    assert first == 0
    while sum(len(e.block_ids) for e in events if isinstance(e, BlocksStored)) < 20:
        engine.step()
        first, more = engine.take_events()
        assert first == len(events)
        events += more
    stored = {tier: set[bytes]() for tier in ("memory", "disk")}
    for event in events:
        assert isinstance(event, BlocksStored | BlocksRemoved)
        if isinstance(event, BlocksStored):
            stored[event.tier].update(event.block_ids)
    assert len(stored["memory"]) == 10 and stored["disk"] == stored["memory"]
    snapshot = engine.snapshot()
    for tier, block_ids in stored.items():
        assert {i for event in snapshot if event.tier == tier for i in event.block_ids} == block_ids
    assert engine.take_events() == (len(events), [])
    engine.close()


def test_a_stop_writes_what_memory_still_holds(tiny: Callable[..., Path], tmp_path: Path) -> None:
    engine = disk_engine(tiny("llama"), tmp_path)
    run(engine, [make_request("a", list(range(3, 45)), max_tokens=1)])
    engine.close()
    again = disk_engine(tiny("llama"), tmp_path)
    result = run(again, [make_request("a", list(range(3, 45)), max_tokens=1)])
    assert result["a", 0].num_cached_tokens == 40
    again.close()


def test_a_block_on_disk_that_is_not_finite_spoils_no_request(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Written by an engine that did not look; its checksum is right."""
    request = make_request("a", list(range(3, 45)), max_tokens=4)
    engine = disk_engine(tiny("llama"), tmp_path)
    (first, *_) = block_identities(engine.root, request.prompt, engine.config.block_size)
    assert engine.moves.disk is not None
    engine.moves.disk.put(first, engine.root, bytearray(b"\xff" * engine.kv_block_bytes))  # NaN, all of them
    assert engine.moves.disk.flush(10.0)
    engine.moves.prefill_rate.add(1.0, 1e6)
    assert tokens_of(run(engine, [request])) == tokens_of(run(make_engine(tiny("llama")), [request]))
    moves = engine.stats().moves
    assert moves is not None and (moves.damaged_blocks, moves.disk_hit_blocks) == (1, 0)
    engine.close()


def test_blocks_of_other_kernels_are_neither_read_nor_sent(tiny: Callable[..., Path], tmp_path: Path) -> None:
    engine, other = disk_engine(tiny("llama"), tmp_path), make_engine(tiny("llama"))
    request = make_request("a", list(range(3, 45)), max_tokens=1)
    run(engine, [request])
    drain_to_disk(engine)
    for one in (engine, other):
        ops = one.runner.model.ops
        one.set_ops(ops.replace(source="pack", linear=ops.linear))
        one.step()
    assert run(engine, [request])["a", 0].num_cached_tokens == 0
    asking = make_engine(tiny("llama"))
    asking.moves.use_remote(Peer(other))
    asking.add(remote(request))
    other.step()
    asking.step()
    assert asking.stats().computed_prompt_tokens > 0 and other.stats().computed_prompt_tokens == 0
    engine.close()


def test_a_folder_that_cannot_be_one_stops_the_start(tiny: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        disk_engine(tiny("llama"), tmp_path / "file" / "kv")
    assert "disk" in (caught.value.param or "")


def test_a_tier_too_small_for_a_block_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no room for a block") as caught:
        make_engine(tiny("llama"), kv_disk_gb=1e-7, kv_disk_path=str(tmp_path / "kv"))
    assert caught.value.hint and caught.value.param == "kv_disk_gb"


def test_what_a_block_is_made_of_is_told(tiny: Callable[..., Path], tmp_path: Path) -> None:
    one, same = make_engine(tiny("llama")), make_engine(tiny("llama"))
    other = make_engine(tiny("llama"), dtype="bfloat16")
    wider = make_engine(tiny("gemma2"))
    formats = [engine.hello_fields["kv_format"] for engine in (one, same, other, wider)]
    assert formats[0] == formats[1] and len(set(formats)) == 3
    assert one.hello_fields["kv_block_bytes"] == 2 * other.hello_fields["kv_block_bytes"]
    assert one.hello_fields["kv_disk"] == ""
    tiers = [disk_engine(tiny("llama"), tmp_path / name) for name in ("a", "a", "b")]
    names = [engine.hello_fields["kv_disk"] for engine in tiers]
    assert names[0] == names[1] != names[2] and all(names)
    assert f"disk tier: up to 0.1 GB in {tmp_path / 'b'}" in tiers[2].hello_fields["notes"]
    for engine in tiers:
        engine.close()
