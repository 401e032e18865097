"""What `headrace ps` and `headrace why` make of replicas with roles and of blocks that moved."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from headrace.cli import ps, why
from headrace.cli.announce import print_model
from headrace.cli.console import Printer
from headrace.cli.prepare import prepare
from headrace.core.deployment import ModelDeployment, WorkerDeployment
from headrace.core.errors import StartupError
from headrace.core.messages import Moves
from headrace.core.routing import Candidate, Decision, Endpoint, FleetStatus, Member, ReplicaStatus, Role
from headrace.gateway.fleet_metrics import fleet_families


def replica(name: str, role: Role, moves: Moves | None = None) -> ReplicaStatus:
    endpoint = Endpoint(replica_id=name, model="m", address="a", kind="headrace", role=role)
    return ReplicaStatus(member=Member(endpoint=endpoint, state="ready"), moves=moves, num_split=12)


def fleet(*replicas: ReplicaStatus) -> FleetStatus:
    return FleetStatus(policy="p", replicas=list(replicas), models=[], num_queued=0)


MOVES = Moves(fetched_blocks=1234, sent_blocks=56, disk_blocks=78, disk_hit_blocks=9, damaged_blocks=1)


def printed(capsys: pytest.CaptureFixture[str], *replicas: ReplicaStatus) -> list[str]:
    ps._print(fleet(*replicas))
    return capsys.readouterr().out.splitlines()


def test_tiers_are_shown_where_blocks_move(capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = replica("p", "prefill"), replica("d", "decode", MOVES)
    assert ps.tier_cells(prefill) == ["p", "prefill", "12", *["-"] * 6]
    cells = dict(zip(ps.TIER_COLUMNS, ps.tier_cells(decode), strict=True))
    assert (cells["role"], cells["split"], cells["filling"]) == ("decode", "12", "0")
    shown = [cells[name] for name in ("fetched", "sent", "on disk", "disk hits", "damaged")]
    assert shown == ["1,234", "56", "78", "9", "1"]
    for replicas in ([prefill, decode], [replica("u", "unified", MOVES)]):
        lines = printed(capsys, *replicas)
        assert any(all(name in line for name in ps.TIER_COLUMNS) for line in lines)
        assert any("1,234" in line for line in lines)
    assert not any("role" in line or "on disk" in line for line in printed(capsys, replica("u", "unified")))


def test_each_replica_shows_its_pack() -> None:
    with_pack = msgspec.structs.replace(replica("a", "unified"), pack="0123456789abcdef" * 4)
    shown = [
        dict(zip(ps.WIDE_COLUMNS, ps.wide_cells(one), strict=True))["pack"]
        for one in (with_pack, replica("b", "unified"))
    ]
    assert shown == ["0123456789ab", "none"]
    samples = {
        (sample.labels["replica"], sample.labels["pack"])
        for family in fleet_families(fleet(with_pack, replica("b", "unified")), {"m": "named"})
        for sample in family.samples
        if sample.name == "headrace_replica_pack_info"
    }
    assert samples == {("a", "0123456789abcdef" * 4), ("b", "")}


def test_metrics_count_what_moved() -> None:
    status = fleet(replica("p", "prefill"), replica("d", "decode", MOVES))
    samples = {
        (sample.name, sample.labels.get("replica")): sample.value
        for family in fleet_families(status, {"m": "named"})
        for sample in family.samples
    }
    assert samples["headrace_kv_fetched_blocks_total", "d"] == 1234
    assert samples["headrace_kv_disk_blocks", "d"] == 78
    assert ("headrace_kv_disk_blocks", "p") not in samples
    every = {name for name, _ in samples}
    for name in Moves.__struct_fields__:
        words = [word[:5] for word in name.split("_") if word not in ("num", "s")]
        assert any(all(word in each for word in words) for each in every), f"{name} is not in /metrics"


def test_metrics_have_no_sample_of_what_was_not_measured() -> None:
    plain = replica("u", "unified")
    measured = msgspec.structs.replace(
        replica("v", "unified"), decode_rate=30.0, prefill_rate=900.0, ttft_s=0.1
    )
    samples = {
        (sample.name, sample.labels.get("replica")): sample.value
        for family in fleet_families(fleet(plain, measured), {})
        for sample in family.samples
    }
    for name, value in (
        ("replica_decode_tokens_per_second", 30.0),
        ("replica_prefill_tokens_per_second", 900.0),
        ("replica_ttft_seconds", 0.1),
    ):
        assert samples[f"headrace_{name}", "v"] == value
        assert (f"headrace_{name}", "u") not in samples


def test_a_worker_that_refuses_the_key_is_not_told_as_one_that_does_not_answer() -> None:
    note = "http://w refuses the key (status 401) (Name the environment variable that holds its key: …)"
    down = ReplicaStatus(
        member=Member(endpoint=Endpoint(replica_id="w", model="m", address="http://w"), state="down"),
        note=note,
    )
    lines: list[str] = []

    class Lines(Printer):
        def line(self, text: str) -> None:
            lines.append(text)

    model = ModelDeployment(model="m", names=["m"], workers=[WorkerDeployment(url="http://w", id="w")])
    print_model(Lines(), model, {}, {"w": down}, heading=False)
    print_model(Lines(), model, {}, {}, heading=False)
    assert lines[0] == f"worker w: {note}; serving without it and trying again"
    assert lines[1].startswith("worker w: does not answer yet; ")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_no_model_name_as_the_key_is_refused(status: int) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(StartupError) as caught:
            prepare(ModelDeployment(model="", names=[], workers=[WorkerDeployment(url=url)]), lambda *_: None)
        server.shutdown()
        thread.join()
    asked_for_key = status != 404
    assert ("refuses the key" in caught.value.message) == asked_for_key
    assert ("--worker-api-key-env" in (caught.value.hint or "")) == asked_for_key


DECISION = Decision(
    request_id="r",
    caller_id="c",
    model="m",
    at=0.0,
    policy="predicted_ttft",
    attempt=0,
    num_prompt_tokens=4000,
    candidates=[Candidate(replica_id="d", num_cached_tokens=32, num_fetched_tokens=3900, fill_s=0.25)],
    chosen="d",
    reason="least time",
    prefill_replica="p",
    split="3,968 tokens take 1.2 s here and 0.4 s there",
    num_cached_tokens=64,
    num_disk_tokens=32,
    num_fetched_tokens=3900,
    fill_s=0.31,
)


def test_why_tells_of_the_pair_and_what_came_of_it() -> None:
    heading = why.heading(DECISION)
    assert "chose d, its prompt computed by p: least time" in heading and heading.endswith("0.4 s there")
    cells = dict(zip(why.COLUMNS, why.cells(DECISION.candidates[0], chosen=True), strict=True))
    assert (cells["cached"], cells["fetched"], cells["fill ms"]) == ("32", "3,900", "250.0")
    ending = why.ending(DECISION)
    assert "32 of them from disk" in ending and "3,900 tokens fetched from p" in ending
    assert "waited 310 ms for blocks" in ending


def test_why_is_silent_of_pairs_where_there_is_none() -> None:
    plain = msgspec.structs.replace(
        DECISION, prefill_replica="", split="", num_disk_tokens=None, num_fetched_tokens=None, fill_s=None
    )
    assert why.heading(plain).endswith("chose d: least time")
    assert "fetched" not in why.ending(plain) and "disk" not in why.ending(plain)
