"""The commands about rounds and packs: what they print, and what a mistake gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from headrace.cli.packs import roll_out
from headrace.core.control import PACK_REFUSED, PACK_ROLLED_BACK, Done, Progress, Refusal, Rollback, Rollout
from headrace.core.errors import PackError, UnavailableError
from headrace.core.messages import Failed
from headrace.optimize.registry import Registry
from tests.cli.test_commands import PORT, Control
from tests.optimize.fakes import Climber, World
from tests.optimize.judge.candidates import target


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One finished round, in the default folders."""
    made = World(tmp_path)
    made.store.folder = tmp_path / "data" / "headrace" / "rounds"
    made.keys.folder = tmp_path / "config" / "headrace" / "keys"
    made.registry = Registry(keys=made.keys)
    made.loop(Climber(), say=lambda line: None).run(1)
    return made


@pytest.fixture
def control() -> Iterator[Control]:
    made = Control()
    yield made
    made.close()


def test_rounds_are_listed_and_shown(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds"]) == 0
    out = capsys.readouterr().out
    assert "decoder_layer, decode" in out
    assert "won" in out
    assert main(["rounds", "show", "last"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "002  wrong_result: off by one",
        "003  right  decode/1 1.50x [1.49, 1.51]  best so far  speed=1.5",
        "-// 1.1 decoder_layer",
        "+// 1.5 decoder_layer",
        "won: end to end decode_tok_s 1.25x",
        "published",
        "skipped",
    ):
        assert expected in out, expected
    assert main(["rounds", "show", "last", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert records["04-verify-002"]["reason"] == "wrong_result"


def test_a_round_that_is_not_there(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds", "show", "nothing"]) == 1
    assert "no round is called 'nothing'" in capsys.readouterr().err
    assert main(["rounds", "--rounds-dir", "/nowhere"]) == 0
    assert capsys.readouterr().out.strip() == "no rounds"


def test_packs_are_listed_shown_and_verified(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = world.registry.packs()
    assert main(["packs", "list"]) == 0
    assert listed.id[:12] in capsys.readouterr().out
    assert main(["packs", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == listed.id
    assert main(["packs", "show", "latest"]) == 0
    out = capsys.readouterr().out
    assert listed.id in out
    assert "measured won: end to end decode_tok_s 1.25x" in out
    assert main(["packs", "verify", listed.id[:8]]) == 0
    assert "holds: signature, 5 files" in capsys.readouterr().out
    assert main(["packs", "audit"]) == 0
    assert "published" in capsys.readouterr().out
    folder = world.registry.fetch(listed.id)
    assert main(["packs", "verify", str(folder)]) == 0
    next(folder.rglob("k.cpp")).write_text("// evil")
    assert main(["packs", "verify", listed.id]) == 1
    assert "not the file that was signed" in capsys.readouterr().err


def test_a_pack_is_rolled_out_and_kept_in_the_audit_log(
    world: World, control: Control, capsys: pytest.CaptureFixture[str]
) -> None:
    (listed,) = world.registry.packs()
    control.script = [Progress("canary: prepared"), Done("2 replicas run it")]
    assert main(["packs", "rollout", "latest", "--port", str(PORT), "--approver", "ann"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "2 replicas run it\n"
    assert captured.err == "canary: prepared\n"
    asked = control.asked[0]
    assert isinstance(asked, Rollout)
    assert asked == Rollout(str(world.registry.fetch(listed.id)), "ann", "")
    control.script = [Done("back")]
    assert main(["packs", "rollback", "--port", str(PORT), "--approver", "bob"]) == 0
    assert control.asked[1] == Rollback("bob", "")
    events = world.registry.audit()
    assert [(event.action, event.approver) for event in events[1:]] == [
        ("rolled_out", "ann"),
        ("rolled_back", "bob"),
    ]


@pytest.mark.parametrize(("code", "outcome"), [(PACK_REFUSED, "refused"), (PACK_ROLLED_BACK, "rolled_back")])
def test_a_server_that_takes_it_back(world: World, control: Control, code: str, outcome: str) -> None:
    failed = Failed.of_error("", PackError("the canary is slower", code=code))
    control.script = [Progress("canary"), Refusal(failed)]
    (listed,) = world.registry.packs()
    record = roll_out(
        world.registry, listed.id, port=PORT, model="", approver="policy", say=lambda line: None
    )
    assert (record.outcome, record.detail, record.steps) == (outcome, "the canary is slower", ["canary"])
    assert world.registry.audit()[-1].action == outcome


def test_no_server_is_no_rollback(world: World) -> None:
    (listed,) = world.registry.packs()
    with pytest.raises(UnavailableError, match="no headrace server runs"):
        roll_out(world.registry, listed.id, port=4712, model="", approver="me", say=lambda line: None)


def test_no_compiler_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["optimize", "kernels", "no-such-model"]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith("error: no C++ compiler")
    assert "hint: install g++" in captured


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--proposer", "agent"], "needs --agent COMMAND"),
        (["--rollout", "everywhere"], "--rollout takes the port"),
        (["--quantization", "int8"], "judged on weights as they were loaded"),
        (["--pack", "x"], "builds on --base"),
    ],
)
def test_wrong_usage(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "kernels", "no-such-model", *argv]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.py", "model.py:", "model.py:My Block"])
def test_a_file_without_its_class(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("raise SystemExit\nclass Norm: ...\nclass Block: ...\n")
    assert main(["optimize", "kernels", f"{tmp_path}/{name}"]) == 2
    captured = capsys.readouterr().err
    assert f"{tmp_path}/model.py:Block; its classes are Norm, Block" in captured
    assert main(["optimize", "kernels", "nowhere.py"]) == 2
    assert "nowhere.py:CLASS" in capsys.readouterr().err


def test_a_registry_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["packs", "list", "--registry", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main(["packs", "list", "--registry", str(tmp_path / "nothing there")]) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"op": "nothing"}, "no op is called 'nothing'"),
        ({"dims": {}}, "needs 'size'"),
        ({"floats": {}}, "needs 'eps'"),
        ({"shapes": []}, "names no shapes"),
        ({"weight_dtype": "int3"}, "dtype 'int3'"),
        ({"max_rows": 0}, "at least 1"),
        ({"module": "model.py:Block"}, "without its call"),
    ],
)
def test_a_target_that_is_not_whole(
    changes: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target.json").write_bytes(msgspec.json.encode(target(**changes)))
    assert main(["judge", str(tmp_path)]) == 2
    captured = capsys.readouterr().err
    assert words in captured and "hint:" in captured


def test_a_verdict_that_cannot_be_written_is_still_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target.json").write_bytes(msgspec.json.encode(target()))
    (tmp_path / "verdict.json").mkdir()
    assert main(["judge", str(tmp_path), "--verify-only"]) == 1
    captured = capsys.readouterr()
    assert "malformed: no kernel.json" in captured.out
    assert "cannot be written" in captured.err
