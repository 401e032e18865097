"""A prompt computed by one replica and answered by another, from disk as well: nobody outside can tell.

Contract: exact (float32).
"""

from __future__ import annotations

import os
import re
import resource
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.core.control import Why, WhyReply
from tests.replica.harness import Peer
from tests.system.home import Home
from tests.system.server import Server, wait_until
from tests.system.streams import CHAT, TEXT, Stream, check_complete, check_same, run, until
from tests.system.tiny import write_model

NUM_REQUESTS = 100
LENGTH = 24
MAX_LEN = 2048
COMMON = (
    *("--dtype", "float32", "--threads", "1", "--max-num-seqs", "64", "--block-size", "16"),
    *("--served-model-name", "tiny", "--shutdown-grace-s", "5", "--max-concurrent-requests", "1000"),
)
# Memory for a dozen of the longest prompts: the others' blocks are on disk, or computed again.
SPLIT = ("--prefill", "1", "--decode", "2", "--kv-cache-gib", "0.01", "--kv-disk-gb", "1")


def mixed(count: int, topic: str) -> list[Stream]:
    """Greedy and seeded, in pairs, with log-probabilities and penalties, chats; short prompts and long ones,
    some of which begin alike."""
    streams = []
    for i in range(count):
        prompt = f"{topic} {i}: the capital"
        if i % 5 in (1, 2, 4):
            prompt = f"{topic} {i // 2}, said {'one two three ' * (20 + 4 * (i % 20))}and {prompt}"
        body: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
        kind = i % 7
        if kind in (1, 5):
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": i}
        elif kind == 2:
            body |= {"temperature": 1.1, "seed": i, "n": 2, "logprobs": 1}
        elif kind == 3:
            body |= {"logprobs": 2}
        elif kind == 4:
            body |= {"temperature": 0.7, "seed": i, "presence_penalty": 0.6, "frequency_penalty": 0.4}
        if kind in (5, 6):
            streams.append(Stream(CHAT, {**body, "messages": [{"role": "user", "content": prompt}]}))
        else:
            streams.append(Stream(TEXT, {**body, "prompt": prompt}))
    return streams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", max_len=MAX_LEN)


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[str, list[Stream]]:
    """What one unified replica answers, which computes everything itself."""
    with Home() as home, Server(str(model), *COMMON, environment=home.environment) as server:
        answered = {}
        for topic in ("first", "second"):
            answered[topic] = run(server.url, mixed(NUM_REQUESTS, topic))
            check_complete(answered[topic])
        home.stop(server)
    return answered


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with Home() as made:
        yield made


def start(model: Path, home: Home) -> Server:
    return Server(
        str(model), *COMMON, *SPLIT, "--kv-disk-path", str(disk(home)), environment=home.environment
    )


@pytest.fixture(scope="module")
def fleet(model: Path, home: Home) -> Iterator[Server]:
    with start(model, home) as server:
        yield server


@pytest.fixture(scope="module")
def restarted(model: Path, home: Home, fleet: Server) -> Iterator[Server]:
    """Another server, after the first has ended, with the same disk."""
    assert fleet.process.poll() is not None
    with start(model, home) as server:
        yield server


def disk(home: Home) -> Path:
    return home.path / "kv"


def blocks_on_disk(home: Home) -> list[Path]:
    return [path for path in disk(home).rglob("*") if path.is_file() and len(path.name) == 64]


def moved(server: Server, name: str) -> int:
    """One counter of what moved, over all replicas."""
    return sum(line.get("moves", {}).get(name, 0) for line in server.replicas().values())


def check_idle(server: Server) -> None:
    """All replicas are there, hold nothing, and wait for nothing."""

    def is_idle() -> bool:
        lines = server.replicas().values()
        return len(lines) == 3 and all(
            line["member"]["state"] == "ready"
            and not any(line.get(name) for name in ("num_in_flight", "num_running", "num_waiting"))
            and line.get("kv_cache_usage", 0) == 0
            and not line.get("moves", {}).get("num_filling", 0)
            for line in lines
        )

    wait_until(is_idle, "an idle fleet")


def descriptors(server: Server) -> dict[int, int]:
    """How many files and sockets each process of the server has open."""
    found = {}
    for pid in (server.process.pid, *server.descendants()):
        found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def settled(server: Server) -> dict[int, int]:
    """The same, once the callers' connections are gone."""
    last: list[dict[int, int]] = [{}]

    def is_still() -> bool:
        before, last[0] = last[0], descriptors(server)
        return before == last[0]

    wait_until(is_still, "descriptors come to rest")
    return last[0]


def check(streams: Sequence[Stream], reference: Sequence[Stream]) -> None:
    check_complete(streams)
    check_same(streams, reference)


def segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_split_serving_gives_the_same_tokens(fleet: Server, reference: dict[str, list[Stream]]) -> None:
    before = segments()
    streams = [stream.again() for stream in reference["first"]]
    for number, stream in enumerate(streams):
        stream.request_id, stream.wants_receipt = f"ask-{number}", True
    run(fleet.url, streams)
    check(streams, reference["first"])
    check_idle(fleet)
    lines = fleet.replicas()
    assert {name: line["member"]["endpoint"].get("role") for name, line in lines.items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    assert sum(lines[name].get("num_split", 0) for name in ("decode-0", "decode-1")) > 10
    assert lines["prefill-0"].get("generation_tokens", 0) == 0, "all was answered by decode replicas"
    assert moved(fleet, "fetched_blocks") > 100 and moved(fleet, "failed_fetches") == 0
    assert moved(fleet, "sent_bytes") >= moved(fleet, "fetched_bytes") > 0
    assert segments() == before
    fetched = [stream for stream in streams if stream.receipt["tokens"]["fetched"]]
    assert len(fetched) > 10
    for stream in fetched:
        check_told(fleet, stream)
    assert "fetched" in fleet.command("ps").stdout
    with urllib.request.urlopen(f"{fleet.url}/metrics") as response:
        metrics = response.read().decode()
    counted = re.search(r'^headrace_kv_fetched_blocks_total\{.*"decode-0".*\} (\S+)$', metrics, re.MULTILINE)
    assert counted is not None and float(counted[1]) == lines["decode-0"]["moves"]["fetched_blocks"]


def check_told(server: Server, stream: Stream) -> None:
    """Receipt and decision of a request whose prompt another replica computed say so, and agree."""
    tokens, parts = stream.receipt["tokens"], stream.receipt["waterfall_ms"]
    assert stream.receipt["prefill_replica"] == "prefill-0" and parts["fill"] > 0
    assert tokens["cached"] + tokens["fetched"] + tokens["computed"] == tokens["prompt"]
    assert sum(value for name, value in parts.items() if name != "total") == pytest.approx(parts["total"])
    (reply,) = server.tell(Why(stream.request_id))
    assert isinstance(reply, WhyReply)
    (decision,) = reply.decisions
    assert decision.prefill_replica == "prefill-0" and decision.chosen == stream.receipt["replica"]
    assert decision.num_fetched_tokens == tokens["fetched"] and decision.split


def test_commands_ask_for_the_role(fleet: Server) -> None:
    done = fleet.command("scale", "3")
    assert done.returncode == 1 and "say which" in done.stderr and "--role" in done.stderr


def test_what_memory_lost_comes_from_disk(
    fleet: Server, home: Home, reference: dict[str, list[Stream]]
) -> None:
    wait_until(lambda: blocks_on_disk(home), "blocks are written")
    check_idle(fleet)
    open_before, hits = settled(fleet), moved(fleet, "disk_hit_blocks")
    check(run(fleet.url, [stream.again() for stream in reference["first"]]), reference["first"])
    check_idle(fleet)
    assert moved(fleet, "disk_hit_blocks") > hits
    assert moved(fleet, "damaged_blocks") == 0
    open_after = settled(fleet)
    assert open_after == open_before, "not a file or socket more"


def test_each_side_killed_in_turn_costs_no_token(
    fleet: Server, home: Home, reference: dict[str, list[Stream]]
) -> None:
    before = segments()
    streams = [stream.again() for stream in reference["second"]]

    victims = [fleet.pid_of(name) for name in ("prefill-0", "decode-0")]
    watched = Peer(Path(fleet.replicas()["decode-1"]["member"]["endpoint"]["address"]))

    def is_filling() -> bool:
        moves = watched.probe().stats.moves
        return moves is not None and moves.num_filling >= 1

    def num_begun() -> int:
        return sum(stream.num_events > 1 for stream in streams)

    async def faults() -> None:
        # Where the machine is too fast or too busy for a look at them, with the streams half begun at least.
        await until(lambda: is_filling() or num_begun() > 40, "blocks are on their way")
        os.kill(victims[0], signal.SIGKILL)
        await until(lambda: num_begun() > 50, "half of them run")
        os.kill(victims[1], signal.SIGKILL)
        assert not all(stream.done for stream in streams)

    run(fleet.url, streams, faults)
    check(streams, reference["second"])
    check_idle(fleet)
    ends = {
        name: line["member"]["endpoint"].get("num_restarts", 0) for name, line in fleet.replicas().items()
    }
    assert ends == {"prefill-0": 1, "decode-0": 1, "decode-1": 0}
    watched.close()
    assert segments() == before
    assert list((disk(home) / "tmp").iterdir()) == [], "nothing half written is left"


def test_nothing_is_left_but_the_disk_tier(fleet: Server, home: Home) -> None:
    home.stop(fleet)
    assert blocks_on_disk(home)
    assert list((disk(home) / "tmp").iterdir()) == []


def test_a_restarted_server_finds_its_disk_tier(
    restarted: Server, reference: dict[str, list[Stream]]
) -> None:
    check(run(restarted.url, [stream.again() for stream in reference["first"]]), reference["first"])
    check_idle(restarted)
    assert moved(restarted, "disk_hit_blocks") > 100


def test_damaged_files_are_dropped_and_computed_again(
    restarted: Server, home: Home, reference: dict[str, list[Stream]]
) -> None:
    for number, path in enumerate(blocks_on_disk(home)):
        spoil(path, number % 4)
    wanted = reference["second"][:60]
    check(run(restarted.url, [stream.again() for stream in wanted]), wanted)
    check_idle(restarted)
    assert moved(restarted, "damaged_blocks") > 0


def spoil(path: Path, how: int) -> None:
    """A flipped bit, a truncated file, an empty one, or one that is longer."""
    content = bytearray(path.read_bytes())
    if how == 0:
        content[-7] ^= 4
    elif how == 1:
        del content[len(content) // 2 :]
    elif how == 2:
        content.clear()
    else:
        content += b"more"
    path.write_bytes(content)


def test_a_full_disk_stops_the_tier_and_nothing_else(
    restarted: Server, home: Home, reference: dict[str, list[Stream]]
) -> None:
    for path in blocks_on_disk(home):
        path.unlink(missing_ok=True)
    # No file may grow beyond its header, as if the disk had room for no more.
    for pid in restarted.pids("headrace.replica"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    wanted = reference["first"][:60]
    check(run(restarted.url, [stream.again() for stream in wanted]), wanted)
    check_idle(restarted)
    wait_until(lambda: "takes no blocks for now" in restarted.log, "the tier says that it stopped")
    assert moved(restarted, "disk_refused_blocks") > 0
    assert list((disk(home) / "tmp").iterdir()) == []
    home.stop(restarted)
