"""A pack's folder: made from a candidate that won, and checked before anything of it is used.

    pack.json                     PackManifest: kernels, conditions, provenance, a digest of every other file
    signature.json                keys.Signature over pack.json
    kernels/<digest>/             a candidate's own files, byte for byte as they were judged
    evidence/<digest>/            target.json, verdict.json, measurement.json of that candidate;
    evidence/<digest>/<target>/   or these of each target that it was judged on, where there are several

``<digest>`` are the first 16 digits of the candidate's. A pack whose conditions name no shapes runs on any
model: each of its kernels was then judged on at least ANY_MODEL targets that differ in dimensions or in the
formats of weights.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from headrace.core.errors import PackError
from headrace.core.files import read_regular
from headrace.core.packs import KernelEntry, PackConditions, PackManifest
from headrace.core.signatures import MAX_BYTES
from headrace.core.words import count
from headrace.optimize.digest import candidate_digest, candidate_files, file_digest
from headrace.optimize.keys import Keys, Signature
from headrace.optimize.records import Measurement, Target, Verdict

FORMAT = 1
MANIFEST, SIGNATURE = "pack.json", "signature.json"
DIGEST_DIGITS = 16
ANY_MODEL = 3
LICENCE = "Apache-2.0"


@dataclass(frozen=True)
class Winner:
    """A candidate's folder with all that was found out about it on one target."""

    folder: Path
    entry: KernelEntry
    target: Target
    verdict: Verdict
    measurement: Measurement
    author: str


@dataclass(frozen=True)
class Evidence:
    """What a pack says of one kernel on one target."""

    target: Target
    verdict: Verdict
    measurement: Measurement


def make_pack(
    folder: Path,
    *winners: Winner,
    name: str,
    conditions: PackConditions,
    round_id: str,
    keys: Keys,
    base: Path | None = None,
    licence: str = LICENCE,
) -> str:
    """Writes a signed pack into ``folder``, which is empty; returns its id. Of several winners, those
    with the same files are one kernel on several targets.

    It contains the kernels of ``base`` too, but those that the new ones replace. Raises PackError if a
    candidate's files are not those that the evidence is about, or if the conditions ask for more evidence.
    """
    digests = [candidate_digest(winner.folder) for winner in winners]
    for winner, digest in zip(winners, digests, strict=True):
        _check_evidence(winner.folder.name, digest, winner.verdict, winner.measurement)
    kernels: list[KernelEntry] = []
    builds_on = ""
    if base is not None:
        manifest = read_manifest(base)
        builds_on = pack_id(base)
        kept = [
            entry for entry in manifest.kernels if not any(_covers(winner.entry, entry) for winner in winners)
        ]
        for place in {_place(entry) for entry in kept}:
            for kind in ("kernels", "evidence"):
                shutil.copytree(base / kind / place, folder / kind / place)
        kernels += kept
    for digest in dict.fromkeys(digests):
        place = digest[:DIGEST_DIGITS]
        own = [winner for winner, other in zip(winners, digests, strict=True) if other == digest]
        _copy_candidate(own[0].folder, folder / "kernels" / place)
        for words, winner in _named(own).items():
            _write_evidence(folder / "evidence" / place / words, winner)
        source = f"kernels/{place}/{own[0].entry.source}"
        kernels.append(msgspec.structs.replace(own[0].entry, source=source))
    manifest = PackManifest(
        format=FORMAT,
        name=name,
        kind="kernels",
        kernels=kernels,
        conditions=conditions,
        author=", ".join(dict.fromkeys(winner.author for winner in winners)),
        round_id=round_id,
        licence=licence,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        files={relative: file_digest(folder / relative) for relative in _files(folder)},
        builds_on=builds_on,
        summary="; ".join(
            dict.fromkeys(map(summarize, winners) if len(digests) == 1 else _by_model(winners))
        ),
    )
    for entry in kernels:
        _check_any_model(folder, entry, conditions)
    body = _pretty(manifest)
    (folder / MANIFEST).write_bytes(body)
    (folder / SIGNATURE).write_bytes(_pretty(keys.sign(body)))
    return hashlib.sha256(body).hexdigest()


def summarize(winner: Winner) -> str:
    """The gain in one line."""
    gains = [
        f"{name} {ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
        for name, ratio in winner.measurement.end_to_end.items()
    ]
    formats = "".join(f", {name}" for name in dict.fromkeys(winner.target.weight_formats))
    return f"{winner.target.op}, {winner.target.phase}{formats}: {', '.join(gains)}"


def _by_model(winners: Sequence[Winner]) -> Iterator[str]:
    """The gains of several kernels in one line a model: they were measured together."""
    for winner in winners:
        gains, target = winner.measurement.end_to_end, winner.target
        words = ", ".join(f"{name} {ratio.median:.2f}x" for name, ratio in gains.items())
        if winner.entry.op == winners[0].entry.op:
            yield f"{Path(target.model).name} ({', '.join(dict.fromkeys(target.formats))}) {words}"


def read_evidence(folder: Path, entry: KernelEntry) -> list[Evidence]:
    """All that the pack in ``folder`` says of one of its kernels, unchecked. Raises PackError."""
    base = folder / "evidence" / _place(entry)
    places = [base] if (base / "verdict.json").exists() else sorted(base.glob("*/"))
    return [
        Evidence(
            _read(place / "target.json", Target),
            _read(place / "verdict.json", Verdict),
            _read(place / "measurement.json", Measurement),
        )
        for place in places
    ]


def verify_pack(folder: Path, keys: Keys | None = None) -> PackManifest:
    """The manifest of a pack whose signature, files and evidence hold; raises PackError with the reason.

    Whether it suits this machine and a model is for the loader to say.
    """
    keys = keys or Keys()
    manifest = read_manifest(folder)
    signature = _read(folder / SIGNATURE, Signature)
    reason = keys.check((folder / MANIFEST).read_bytes(), signature)
    if reason is not None:
        raise PackError(f"pack {folder.name}: {reason}")
    found = _files(folder)
    if extra := sorted(set(found) - set(manifest.files)):
        raise PackError(f"pack {folder.name}: {extra[0]} is in its folder and not in its manifest")
    for relative, digest in manifest.files.items():
        if relative not in found:
            raise PackError(f"pack {folder.name}: {relative} is missing")
        if file_digest(folder / relative) != digest:
            raise PackError(
                f"pack {folder.name}: {relative} is not the file that was signed (its digest differs)"
            )
    if not manifest.kernels:
        raise PackError(
            f"pack {folder.name}: it holds no kernels", hint="name some in its pack.json and sign it"
        )
    for entry in manifest.kernels:
        _check_kernel(folder, entry)
        _check_any_model(folder, entry, manifest.conditions)
    return manifest


def pack_id(folder: Path) -> str:
    """The digest of its pack.json, hexadecimal."""
    return file_digest(folder / MANIFEST)


def read_manifest(folder: Path) -> PackManifest:
    """What the pack says of itself, unchecked but for its form. Raises PackError."""
    manifest: PackManifest = _read(folder / MANIFEST, PackManifest)
    if manifest.format != FORMAT or manifest.kind != "kernels":
        raise PackError(
            f"pack {folder.name}: format {manifest.format}, kind {manifest.kind!r}; "
            f"this version reads format {FORMAT} of kernels",
        )
    for relative in (*manifest.files, *(entry.source for entry in manifest.kernels)):
        pure = PurePosixPath(relative)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != relative:
            raise PackError(f"pack {folder.name}: {relative!r} is no path inside the pack")
    return manifest


def _check_kernel(folder: Path, entry: KernelEntry) -> None:
    """The kernel's files are those of a candidate that was right and faster."""
    parts = PurePosixPath(entry.source).parts
    if len(parts) < 3 or parts[0] != "kernels":
        raise PackError(f"pack {folder.name}: {entry.source} is not below kernels/<digest>")
    place = parts[1]
    evidence = read_evidence(folder, entry)
    if not evidence:
        raise PackError(f"pack {folder.name}: nothing says that {entry.source} was judged")
    candidate = folder / "kernels" / place
    judged = _read(candidate / "kernel.json", KernelEntry)
    if msgspec.structs.replace(judged, source=f"kernels/{place}/{judged.source}") != entry:
        raise PackError(f"pack {folder.name}: {entry.op} is not declared as it was judged")
    digest = candidate_digest(candidate)
    for one in evidence:
        _check_evidence(folder.name, digest, one.verdict, one.measurement)
        if one.target.op != entry.op and not one.target.module:
            raise PackError(f"pack {folder.name}: {entry.op} was judged as {one.target.op}")


def _check_any_model(folder: Path, entry: KernelEntry, conditions: PackConditions) -> None:
    """Raises PackError for a kernel that may run on any model and was judged on few."""
    if conditions.shapes:
        return
    targets = [one.target for one in read_evidence(folder, entry)]
    different = {(tuple(sorted(one.dims.items())), tuple(one.formats)) for one in targets}
    if len(different) < ANY_MODEL:
        raise PackError(
            f"pack {folder.name}: its conditions name no shapes, so that it runs on any model, and "
            f"{entry.op} was judged on {count(len(different), 'target')} of different dimensions or formats",
            hint=f"judge it on {ANY_MODEL} at least, or name the shapes of the model that it is for",
        )


def _copy_candidate(source: Path, to: Path) -> None:
    for relative in candidate_files(source):
        (to / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, to / relative)


def _named(winners: Sequence[Winner]) -> dict[str, Winner]:
    """Folders for the evidence: one needs none of its own."""
    if len(winners) == 1:
        return {"": winners[0]}
    named: dict[str, Winner] = {}
    for winner in winners:
        target = winner.target
        words = f"{Path(target.model).name} {target.phase} {' '.join(dict.fromkeys(target.formats))}"
        stem = re.sub(r"[^a-z0-9._]+", "-", words.lower()).strip("-.")
        name, number = stem, 2
        while name in named:
            name, number = f"{stem}-{number}", number + 1
        named[name] = winner
    return named


def _write_evidence(folder: Path, winner: Winner) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = {"target": winner.target, "verdict": winner.verdict, "measurement": winner.measurement}
    for stem, record in records.items():
        (folder / f"{stem}.json").write_bytes(_pretty(record))


def _check_evidence(name: str, digest: str, verdict: Verdict, measurement: Measurement) -> None:
    for what, record in (("verdict", verdict), ("measurement", measurement)):
        if record.digest != digest:
            raise PackError(
                f"{name}: its {what} is about other files "
                f"(digest {record.digest[:12]}, these are {digest[:12]})"
            )
    if not verdict.passed:
        raise PackError(f"{name}: its verdict is {verdict.reason}: {verdict.detail}")
    if not measurement.won:
        raise PackError(f"{name}: its measurement is no win: {measurement.detail}")


def _covers(new: KernelEntry, old: KernelEntry) -> bool:
    """Whether ``old`` would never be called once ``new`` is there."""
    return (
        new.op == old.op
        and set(old.phases) <= set(new.phases)
        and set(old.activation_dtypes) <= set(new.activation_dtypes)
        and (new.max_rows == 0 or 0 < old.max_rows <= new.max_rows)
        and set(old.weight_formats) <= set(new.weight_formats)
    )


def _place(entry: KernelEntry) -> str:
    return PurePosixPath(entry.source).parts[1]


def _files(folder: Path) -> list[str]:
    """Every file but manifest and signature, relative, sorted. Raises PackError for a link."""
    found = []
    for path in folder.rglob("*"):
        relative = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise PackError(f"pack {folder.name}: {relative} is a link")
        if path.is_file() and relative not in (MANIFEST, SIGNATURE):
            found.append(relative)
    return sorted(found)


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_regular(path, MAX_BYTES), type=kind)
    except FileNotFoundError:
        raise PackError(f"{path.parent} is no whole pack: {path.name} is missing") from None
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PackError(f"{path}: {error}") from error


def _pretty(record: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
