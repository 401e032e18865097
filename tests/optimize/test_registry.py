"""Packs: published whole, and refused for whatever does not hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.core.errors import NotFoundError, PackError, StartupError, UsageError
from headrace.core.packs import KernelEntry, PackConditions
from headrace.optimize.digest import candidate_digest
from headrace.optimize.keys import Keys, Signature
from headrace.optimize.packing import (
    Winner,
    make_pack,
    pack_id,
    read_evidence,
    read_manifest,
    verify_pack,
)
from headrace.optimize.records import Measurement, Verdict
from headrace.optimize.registry import Registry
from headrace.optimize.targets import find_targets
from tests.optimize.fakes import CONFIG, kernel_profile, ratio

ONE_MODEL = PackConditions(shapes={"hidden_size": CONFIG.hidden_size})


def winner(folder: Path, *, op: str = "decoder_layer", text: str = "// fast\n", gain: float = 1.5) -> Winner:
    folder.mkdir(parents=True)
    entry = KernelEntry(op=op, source="k.cpp")
    (folder / "k.cpp").write_text(text)
    (folder / "kernel.json").write_bytes(msgspec.json.encode(entry))
    digest = candidate_digest(folder)
    verdict = Verdict(
        candidate="001", digest=digest, passed=True, reason="ok", detail="", seconds=1.0, sandbox="none"
    )
    measurement = Measurement(
        candidate="001",
        digest=digest,
        alone={"decode/1": ratio(gain)},
        end_to_end={"decode_tok_s": ratio(gain)},
        agreement="",
        won=True,
        detail="",
    )
    target = find_targets(kernel_profile(), CONFIG, block_size=32)[0]
    target = msgspec.structs.replace(target, op=op)
    return Winner(folder, entry, target, verdict, measurement, "search")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def pack(tmp_path: Path, keys: Keys) -> Path:
    return make(tmp_path, keys, winner(tmp_path / "candidate"))


def make(tmp_path: Path, keys: Keys, one: Winner, *, name: str = "pack", base: Path | None = None) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    made = make_pack(folder, one, name="tiny", conditions=ONE_MODEL, round_id="r1", keys=keys, base=base)
    assert made == pack_id(folder)
    return folder


def test_a_pack_holds_its_candidate_and_the_evidence(pack: Path, keys: Keys) -> None:
    manifest = verify_pack(pack, keys)
    (entry,) = manifest.kernels
    assert (pack / entry.source).read_text() == "// fast\n"
    assert manifest.summary == "decoder_layer, decode: decode_tok_s 1.50x [1.49, 1.51]"
    assert {Path(name).name for name in manifest.files} == {
        *("k.cpp", "kernel.json", "target.json", "verdict.json", "measurement.json")
    }


def edit_source(pack: Path) -> None:
    next(pack.rglob("k.cpp")).write_text("// fast and evil\n")


def add_file(pack: Path) -> None:
    (pack / "kernels" / "more.h").write_text("")


def remove_file(pack: Path) -> None:
    next(pack.rglob("verdict.json")).unlink()


def link_file(pack: Path) -> None:
    path = next(pack.rglob("k.cpp"))
    path.rename(pack.parent / "elsewhere.cpp")
    path.symlink_to(pack.parent / "elsewhere.cpp")


def edit_manifest(pack: Path) -> None:
    manifest = json.loads((pack / "pack.json").read_text())
    manifest["summary"] = "100x"
    (pack / "pack.json").write_text(json.dumps(manifest))


def leave_the_folder(pack: Path) -> None:
    manifest = json.loads((pack / "pack.json").read_text())
    manifest["kernels"][0]["source"] = "kernels/../../elsewhere.cpp"
    (pack / "pack.json").write_text(json.dumps(manifest))


def drop_signature(pack: Path) -> None:
    (pack / "signature.json").unlink()


def cut_manifest(pack: Path) -> None:
    (pack / "pack.json").write_bytes((pack / "pack.json").read_bytes()[:50])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (edit_source, "is not the file that was signed"),
        (add_file, "in its folder and not in its manifest"),
        (remove_file, "is missing"),
        (link_file, "is a link"),
        (edit_manifest, "its signature is not one of key"),
        (leave_the_folder, "is no path inside the pack"),
        (drop_signature, "signature.json is missing"),
        (cut_manifest, "pack.json"),
    ],
)
def test_what_does_not_hold_is_refused(
    pack: Path, keys: Keys, change: Callable[[Path], None], reason: str
) -> None:
    change(pack)
    with pytest.raises(PackError, match=reason) as caught:
        verify_pack(pack, keys)
    assert caught.value.code == "pack_refused"


def test_a_signer_that_is_not_trusted_is_refused_until_it_is(tmp_path: Path, pack: Path, keys: Keys) -> None:
    stranger = Keys(tmp_path / "other")
    with pytest.raises(PackError, match="is not trusted here"):
        verify_pack(pack, stranger)
    (stranger.folder / "trusted").mkdir(parents=True)
    (public,) = (keys.folder / "trusted").iterdir()
    shutil.copy(public, stranger.folder / "trusted" / "colleague.pub")
    verify_pack(pack, stranger)


def test_evidence_must_be_about_these_files_and_a_win(tmp_path: Path, keys: Keys) -> None:
    one = winner(tmp_path / "candidate")
    (one.folder / "k.cpp").write_text("// another file than the one that was measured\n")
    with pytest.raises(PackError, match="is about other files"):
        make(tmp_path, keys, one)
    lost = winner(tmp_path / "lost")
    lost = Winner(
        lost.folder,
        lost.entry,
        lost.target,
        lost.verdict,
        msgspec.structs.replace(lost.measurement, won=False, detail="slower end to end"),
        "search",
    )
    with pytest.raises(PackError, match="no win: slower end to end"):
        make(tmp_path, keys, lost, name="second")


def on_targets(one: Winner, count: int) -> list[Winner]:
    """The same kernel on targets of different sizes."""
    return [
        replace(one, target=msgspec.structs.replace(one.target, model=f"m{n}", dims={"size": n}))
        for n in range(count)
    ]


def test_any_model_needs_several_targets(tmp_path: Path, keys: Keys) -> None:
    layer, norm = winner(tmp_path / "layer"), winner(tmp_path / "norm", op="rms_norm", text="// norm\n")
    says = {"name": "any", "conditions": PackConditions(), "round_id": "r1", "keys": keys}
    for few in ([layer], [*on_targets(layer, 2)], [*on_targets(layer, 3), norm], [layer, layer, layer]):
        folder = tmp_path / "few"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with pytest.raises(PackError, match=r"runs on any model, and .* judged on [12] targets? of"):
            make_pack(folder, *few, **says)
    folder = tmp_path / "any"
    folder.mkdir()
    make_pack(folder, *on_targets(layer, 3), *on_targets(norm, 4), **says)
    manifest = verify_pack(folder, keys)
    assert [entry.op for entry in manifest.kernels] == ["decoder_layer", "rms_norm"]
    assert [len(read_evidence(folder, entry)) for entry in manifest.kernels] == [3, 4]
    assert {one.target.model for one in read_evidence(folder, manifest.kernels[0])} == {"m0", "m1", "m2"}
    assert manifest.author == "search" and manifest.summary.startswith(
        "m0 (bfloat16) decode_tok_s 1.50x; m1 "
    )


def test_evidence_that_was_taken_out_is_missed(tmp_path: Path, keys: Keys) -> None:
    """Signed again with less evidence: too little for any model."""
    folder = tmp_path / "any"
    folder.mkdir()
    says = {"name": "any", "conditions": PackConditions(), "round_id": "r1", "keys": keys}
    make_pack(folder, *on_targets(winner(tmp_path / "layer"), 3), **says)
    shutil.rmtree(next(folder.glob("evidence/*/m1-*")))
    manifest = read_manifest(folder)
    files = {name: digest for name, digest in manifest.files.items() if (folder / name).exists()}
    body = msgspec.json.encode(msgspec.structs.replace(manifest, files=files))
    (folder / "pack.json").write_bytes(body)
    (folder / "signature.json").write_bytes(msgspec.json.encode(keys.sign(body)))
    with pytest.raises(PackError, match="judged on 2 targets"):
        verify_pack(folder, keys)


def test_a_signed_pack_whose_evidence_is_of_another_kernel_is_refused(
    tmp_path: Path, pack: Path, keys: Keys
) -> None:
    """Signed with the right key, every digest right: but the verdict is about another file."""
    other = winner(tmp_path / "other", text="// never judged\n")
    manifest = read_manifest(pack)
    path = next(pack.rglob("k.cpp"))
    shutil.copy(other.folder / "k.cpp", path)
    from headrace.optimize.digest import file_digest

    files = {**manifest.files, path.relative_to(pack).as_posix(): file_digest(path)}
    body = msgspec.json.encode(msgspec.structs.replace(manifest, files=files))
    (pack / "pack.json").write_bytes(body)
    (pack / "signature.json").write_bytes(msgspec.json.encode(keys.sign(body)))
    with pytest.raises(PackError, match="its verdict is about other files"):
        verify_pack(pack, keys)


def test_a_signed_pack_without_kernels_is_refused(tmp_path: Path, pack: Path, keys: Keys) -> None:
    shutil.rmtree(pack / "kernels")
    shutil.rmtree(pack / "evidence")
    empty = msgspec.structs.replace(read_manifest(pack), kernels=[], files={})
    body = msgspec.json.encode(empty)
    (pack / "pack.json").write_bytes(body)
    (pack / "signature.json").write_bytes(msgspec.json.encode(keys.sign(body)))
    with pytest.raises(PackError, match="it holds no kernels"):
        verify_pack(pack, keys)


def test_a_pack_contains_what_it_builds_on(tmp_path: Path, pack: Path, keys: Keys) -> None:
    head = make(
        tmp_path, keys, winner(tmp_path / "b", op="logits_head", text="// b\n"), name="second", base=pack
    )
    manifest = verify_pack(head, keys)
    assert [entry.op for entry in manifest.kernels] == ["decoder_layer", "logits_head"]
    assert manifest.builds_on == pack_id(pack)
    # one that covers the same calls takes the old one's place
    newer = make(tmp_path, keys, winner(tmp_path / "c", text="// c\n"), name="third", base=head)
    manifest = verify_pack(newer, keys)
    assert [entry.op for entry in manifest.kernels] == ["logits_head", "decoder_layer"]
    assert "// c\n" in [(newer / entry.source).read_text() for entry in manifest.kernels]


@pytest.mark.parametrize("place", ["folder", "memory://packs-test"])
def test_any_registry_gives_back_what_was_published(
    tmp_path: Path, pack: Path, keys: Keys, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registry = Registry(str(tmp_path / "registry") if place == "folder" else place, keys=keys)
    identity = registry.publish(pack, approver="me")
    assert registry.publish(pack, approver="me") == identity
    (listed,) = registry.packs()
    assert (listed.id, listed.manifest.round_id) == (identity, "r1")
    assert (
        registry.find(identity[:6]).id == registry.find("latest").id == registry.find("tiny").id == identity
    )
    folder = registry.fetch(identity)
    assert verify_pack(folder, keys) == read_manifest(pack)
    assert [event.action for event in registry.audit()] == ["published", "published"]
    with pytest.raises(NotFoundError):
        registry.find("nothing")
    with pytest.raises(NotFoundError):
        registry.fetch("0" * 64)


def test_a_registry_is_not_trusted(tmp_path: Path, pack: Path, keys: Keys) -> None:
    registry = Registry(str(tmp_path / "registry"), keys=keys)
    identity = registry.publish(pack, approver="me")
    edit_source(tmp_path / "registry" / "packs" / identity)
    with pytest.raises(PackError, match="not the file that was signed"):
        registry.fetch(identity)
    # another signed pack in this one's place
    other = make(tmp_path, keys, winner(tmp_path / "b", text="// b\n"), name="second")
    shutil.rmtree(tmp_path / "registry" / "packs" / identity)
    shutil.copytree(other, tmp_path / "registry" / "packs" / identity)
    with pytest.raises(PackError, match="is another's"):
        registry.fetch(identity)


def test_what_is_half_there_is_no_pack(tmp_path: Path, pack: Path, keys: Keys) -> None:
    registry = Registry(str(tmp_path / "registry"), keys=keys)
    identity = registry.publish(pack, approver="me")
    (tmp_path / "registry" / "packs" / identity / "signature.json").unlink()
    (tmp_path / "registry" / "packs" / ".partial-x").mkdir()
    assert registry.packs() == []
    with (tmp_path / "registry" / "audit.jsonl").open("ab") as file:
        file.write(b'{"at": "20')
    assert len(registry.audit()) == 1


def test_a_registry_that_cannot_be_opened() -> None:
    with pytest.raises(UsageError, match="--registry"):
        Registry("nosuchprotocol://x")


def test_keys_are_private_and_kept(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    first = keys.sign(b"x")
    assert (tmp_path / "keys" / "judge.pem").stat().st_mode & 0o777 == 0o600
    assert Keys(tmp_path / "keys").check(b"x", first) is None
    assert "its signature is not" in (keys.check(b"y", first) or "")
    assert "only ed25519" in (keys.check(b"x", Signature(key="k", signature="", algorithm="none")) or "")
    (tmp_path / "keys" / "judge.pem").chmod(0o644)
    with pytest.raises(StartupError, match="may be read by others"):
        keys.sign(b"x")
    (tmp_path / "keys" / "trusted" / "bad.pub").write_text("no key")
    with pytest.raises(StartupError, match="is no public key"):
        keys.trusted()
