"""A pack judged as one: several kernels that somebody wrote together, on several models.

    each model   each kernel: right or wrong, then alone           as any candidate
                 all kernels together: the whole workload, decoding and prompts

What was found is kept by the digests of kernels and target, so that a run that was cut short goes on. A pack
comes of it when every kernel is right everywhere, none is slower alone than what runs today, and with all
of them together every model is faster.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from headrace.core.errors import PackError, UsageError
from headrace.core.leftovers import prefix_of
from headrace.core.packs import KernelEntry
from headrace.optimize.digest import ENTRY_FILE, HEADER, candidate_digest, candidate_files
from headrace.optimize.journal import ratios_text
from headrace.optimize.judge.alone import measure_alone
from headrace.optimize.judge.build import Built
from headrace.optimize.judge.end_to_end import EndToEnd, Setting, compare_engines
from headrace.optimize.judge.lesser_cpu import described
from headrace.optimize.judge.measure import END_TO_END_ABOVE, slower_phase
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.verify import build, verified
from headrace.optimize.packing import Winner
from headrace.optimize.profile.workloads import Workload
from headrace.optimize.records import Measurement, Ratio, Target, Verdict
from headrace.optimize.rounds import data_folder, write_whole

ENTRIES_FILE = "kernels.json"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel on one target, by itself."""

    verdict: Verdict
    alone: dict[str, Ratio]


@dataclass(frozen=True)
class Model:
    """Where a pack is judged: one target for each of its kernels, in their order, and the workloads that all
    of them run together, of which the first decides."""

    targets: Sequence[Target]
    workloads: Sequence[Workload]


def read_entries(sources: Path, file: str = "") -> list[KernelEntry]:
    """The kernels of a folder of sources, as ``file`` declares them, by default its kernels.json.

    Raises UsageError.
    """
    path = Path(file) if file else sources / ENTRIES_FILE
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[KernelEntry])
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", hint="a list of kernels, each as a candidate's kernel.json has it"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    if not entries:
        raise UsageError(f"{path} names no kernels")
    return entries


def split_candidates(sources: Path, entries: Sequence[KernelEntry], folder: Path) -> list[Path]:
    """A candidate's folder for each entry: its source and what that includes of ``sources``."""
    made = []
    for number, entry in enumerate(entries):
        candidate = folder / f"{number}-{entry.op}"
        for name in _included(sources, entry.source, candidate_files(sources)):
            (candidate / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sources / name, candidate / name)
        (candidate / ENTRY_FILE).write_bytes(msgspec.json.encode(entry))
        made.append(candidate)
    return made


def _included(sources: Path, source: str, there: Sequence[str]) -> list[str]:
    """``source`` and the files that it includes, directly or not, of those that are ``there``."""
    found, left = list[str](), [source]
    while left:
        name = left.pop()
        if name in found:
            continue
        if name not in there:
            raise UsageError(f"{sources} has no {name}, which a kernel needs")
        found.append(name)
        text = (sources / name).read_text("utf-8", errors="replace")
        beside = [(PurePosixPath(name).parent / other).as_posix() for other in _INCLUDE.findall(text)]
        left += [other for other in beside if PurePosixPath(other).name != HEADER]
    return sorted(found)


def judge_pack(
    candidates: Sequence[Path],
    entries: Sequence[KernelEntry],
    models: Sequence[Model],
    *,
    author: str,
    options: JudgeOptions,
    say: Callable[[str], None],
    kept: Path | None = None,
) -> list[Winner]:
    """The evidence for a pack of these kernels. ``kept`` is where findings are kept, by default below the
    user's data.

    Raises PackError for a kernel that is wrong or slower and for models that it makes no faster,
    UnavailableError where no sandbox holds.
    """
    kept = kept or data_folder() / "judged"
    kept.mkdir(parents=True, exist_ok=True)
    winners = []
    for model in models:
        judged = []
        for candidate, target in zip(candidates, model.targets, strict=True):
            judged.append(_judged(candidate, target, options, kept, say))
        found = _together(candidates, model, options, kept, say)
        for candidate, entry, target, one in zip(candidates, entries, model.targets, judged, strict=True):
            measurement = Measurement(
                candidate=one.verdict.candidate,
                digest=one.verdict.digest,
                alone=one.alone,
                end_to_end=found.ratios,
                agreement=found.agreement,
                won=True,
                detail=f"with {', '.join(each.op for each in entries)} together",
                limited=described(options.features),
            )
            winners.append(Winner(candidate, entry, target, one.verdict, measurement, author))
    return winners


def _judged(
    candidate: Path, target: Target, options: JudgeOptions, kept: Path, say: Callable[[str], None]
) -> Judged:
    path = kept / f"{_key([candidate], [target], options)}.json"
    where = f"{target.op} on {target.model} ({', '.join(target.formats)})"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Judged)
    with tempfile.TemporaryDirectory(prefix=prefix_of("judge")) as scratch:
        verdict, built = verified(candidate, target, Path(scratch), problem=None, options=options)
        if built is None:
            raise PackError(f"{where}: {verdict.reason}: {verdict.detail}")
        say(f"{where}: right, {verdict.detail} ({verdict.seconds:.0f} s)")
        try:
            alone = measure_alone(built, target.baseline_s, "", options)
        except Rejected as rejected:
            raise PackError(f"{where}: {rejected.reason}: {rejected.detail}") from None
    say(f"{where}: alone {ratios_text(alone)}")
    first, slower = next(iter(alone)), slower_phase(alone)
    if slower or alone[first].high < 1.0:
        raise PackError(f"{where}: slower at {slower or first}: {ratios_text(alone)}")
    found = Judged(verdict=verdict, alone=alone)
    write_whole(path, msgspec.json.encode(found))
    return found


def _together(
    candidates: Sequence[Path], model: Model, options: JudgeOptions, kept: Path, say: Callable[[str], None]
) -> EndToEnd:
    """All kernels in one engine, on every workload."""
    target = model.targets[0]
    words = [workload.name for workload in model.workloads]
    path = kept / f"{_key(candidates, model.targets, options, words)}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=EndToEnd)
    formats = target.weight_formats
    ratios: dict[str, Ratio] = {}
    agreements = []
    with tempfile.TemporaryDirectory(prefix=prefix_of("judge")) as scratch:
        kernels: list[Built] = []
        for number, (candidate, each) in enumerate(zip(candidates, model.targets, strict=True)):
            own = Path(scratch) / str(number)
            own.mkdir()
            try:
                kernels.append(build(candidate, each, own, problem=None, options=options))
            except Rejected as rejected:
                raise PackError(f"{each.op}: {rejected.reason}: {rejected.detail}") from None
        for workload in model.workloads:
            where = f"{target.model} ({', '.join(target.formats)}), {workload.name}"
            try:
                found = compare_engines(
                    kernels, Setting.of(target, workload, None, options), options, formats=formats
                )
            except Rejected as rejected:
                raise PackError(f"{where}: {rejected.reason}: {rejected.detail}") from None
            say(f"{where}: {ratios_text(found.ratios)}; {found.agreement}")
            if not found.agrees:
                raise PackError(f"{where}: its answers differ: {found.agreement}")
            whole = found.ratios["workload"]
            if whole.high < 1.0 or (not ratios and whole.low <= END_TO_END_ABOVE):
                raise PackError(f"{where}: not faster: {ratios_text(found.ratios)}")
            ratios[workload.name] = whole
            agreements.append(f"{workload.name}: {found.agreement}")
    together = EndToEnd(ratios, "; ".join(agreements), True)
    write_whole(path, msgspec.json.encode(together))
    return together


def _key(
    candidates: Sequence[Path], targets: Sequence[Target], options: JudgeOptions, words: Sequence[str] = ()
) -> str:
    total = hashlib.sha256()
    for candidate in candidates:
        total.update(candidate_digest(candidate).encode())
    for target in targets:
        total.update(msgspec.json.encode(target))
    total.update("\0".join(words).encode())
    total.update(described(options.features).encode())
    return total.hexdigest()[:32]
