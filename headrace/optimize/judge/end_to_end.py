"""Is the whole workload faster with it? Two caged engines that differ in the candidate alone take turns.

Their answers are compared too: given the same tokens, how far apart are their log-probabilities, against how
far apart stock operators are from themselves when they compute the same in another way. A pack may compute it
in one way only.
"""

from __future__ import annotations

import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

import headrace
from headrace.core.engine_environment import ENGINE_ENVIRONMENT
from headrace.core.errors import StartupError
from headrace.core.knobs import EngineConfig
from headrace.core.leftovers import prefix_of
from headrace.core.packs import NONE
from headrace.models.resolve import ResolvedModel, resolve_model
from headrace.optimize.judge import lesser_cpu
from headrace.optimize.judge.build import Built
from headrace.optimize.judge.engine_child import (
    EngineCommand,
    EngineReply,
    EngineTask,
    PassReport,
    Position,
)
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.sandbox import GIB, Cage, Caged, Limits, Sandbox
from headrace.optimize.judge.statistics import ratio
from headrace.optimize.profile.workloads import Workload, load_workload
from headrace.optimize.records import Ratio, Target

_START_S = 180.0
_PASS_S = 300.0
_MIN_PAIRS = 5
_MAX_PAIRS = 80
_MAX_REPLY = 16 * 1024**2
_SCORED_SEQUENCES = 2
_SCORED_TOKENS = 128
MAX_WRONG = 0.01
"""Positions at which a candidate may differ by more than the noise floor."""
_ALIKE = 4.0
"""With rounded activations a candidate is as far from what is right as that is from itself. The floor is the
largest of n such distances: another one is larger with a chance of 1 / (n + 1), and positions of one sequence
are alike. So many times that chance is allowed."""


@dataclass(frozen=True)
class EndToEnd:
    """``ratios`` by metric: ``workload`` is whole passes by the judge's clock, which decides;
    ``decode_tok_s`` and ``prefill_tok_s`` are the engines' own. ``agrees``: within the noise floor."""

    ratios: dict[str, Ratio]
    agreement: str
    agrees: bool


@dataclass(frozen=True)
class Setting:
    """What the two engines run. ``pack``: the baseline's folder, None: stock operators."""

    model: ResolvedModel
    workload: Workload
    config: EngineConfig
    pack: Path | None = None

    @staticmethod
    def of(target: Target, workload: Workload | None, pack: Path | None, options: JudgeOptions) -> Setting:
        """By default the named workload of the target's phase."""
        model = resolve_model(target.model, dtype=target.weight_dtype, quantization=target.quantization)
        config = EngineConfig(
            dtype="float32" if target.weight_dtype == "float32" else "bfloat16",
            quantization=target.quantization,  # type: ignore[arg-type]
            threads=options.num_threads,
            block_size=target.dims.get("block_size", 32),
            seed=0,
            pack=NONE,
        )
        if workload is None:
            workload = load_workload(target.phase, _vocab_size(model), max_len=_max_len(model))
        length = min(_max_len(model), max(1024, workload.longest + 1))
        return Setting(model, workload, msgspec.structs.replace(config, max_model_len=length), pack)


def compare_engines(
    built: Built | Sequence[Built], setting: Setting, options: JudgeOptions, *, formats: Sequence[str] = ()
) -> EndToEnd:
    """Interleaved passes of the workload, with one kernel or several together. ``formats``: of the model's
    weights where they are blocks. The answers are then held against an engine that has the same blocks and
    rounds activations as the candidate says, by way of stock operators; else against the baseline.

    Raises Rejected when the candidate fails in the engine, StartupError when another one does.
    """
    kernels = [built] if isinstance(built, Built) else list(built)
    sandbox = kernels[0].sandbox
    with (
        tempfile.TemporaryDirectory(prefix=prefix_of("model")) as scratch,
        _Engine(sandbox, setting, [], options, Path(scratch)) as baseline,
        _Engine(sandbox, setting, kernels, options, Path(scratch)) as candidate,
    ):
        baseline.wait_ready()
        candidate.wait_ready()
        first, own = baseline.run()[1], candidate.run()[1]
        sequences = [
            [*request.prompt, *answer][-_SCORED_TOKENS:]
            for request, answer in zip(setting.workload.requests, first.tokens, strict=True)
        ][:_SCORED_SEQUENCES]
        if formats or setting.pack is not None:
            stock = Setting(setting.model, setting.workload, setting.config)
            like, stands_in = (kernels, True) if formats else ([], False)
            with _Engine(sandbox, stock, like, options, Path(scratch), stands_in=stands_in) as without:
                without.wait_ready()
                floor = _scores(without, sequences)
        else:
            floor = _scores(baseline, sequences)
        right = floor if formats or setting.pack is None else _scores(baseline, sequences)
        allowed = max(MAX_WRONG, _ALIKE / (len(right[0]) + 1)) if formats else MAX_WRONG
        noise = max(_distance(*pair) for pair in zip(*floor, strict=True))
        agreement, agrees = _agreement(right, _scores(candidate, sequences), first, own, noise, allowed)
        ratios = _pairs(baseline, candidate, options.end_to_end_s)
    return EndToEnd(ratios, agreement, agrees)


def _scores(engine: _Engine, sequences: list[list[int]]) -> tuple[list[Position], list[Position]]:
    """As it decodes, and as it computes prompts."""
    return engine.score(sequences, len(sequences), 1), engine.score(sequences, len(sequences), 0)


class _Engine:
    """A caged engine process: no ``kernels``: the baseline; ``stands_in``: says what is right."""

    def __init__(
        self,
        sandbox: Sandbox,
        setting: Setting,
        kernels: Sequence[Built],
        options: JudgeOptions,
        scratch: Path,
        *,
        stands_in: bool = False,
    ) -> None:
        self._is_candidate = bool(kernels) and not stands_in
        libraries = {} if stands_in else {each.library: f"/kernel{n}.so" for n, each in enumerate(kernels)}
        command_read, command_write = os.pipe2(os.O_CLOEXEC)
        reply_read, reply_write = os.pipe2(os.O_CLOEXEC)
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        show = _interpreter() | _model_files(setting.model.folder, scratch)
        if setting.pack is not None:
            show[setting.pack.resolve()] = "/pack"
        show |= libraries
        environment = {
            **ENGINE_ENVIRONMENT,
            "PYTHONPATH": "/app",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(options.num_threads),
            **lesser_cpu.limits(options.features),
        }
        weights = sum(path.stat().st_size for path in setting.model.folder.iterdir() if path.is_file())
        limits = Limits(memory=32 * GIB + 8 * weights, disk=GIB // 2, cpu_s=3600, processes=128)
        cage = Cage(limits, show, environment, (command_read, reply_write))
        argv = [
            sys.executable,
            "-m",
            "headrace.optimize.judge.engine_child",
            str(command_read),
            str(reply_write),
        ]
        taskset = shutil.which("taskset")
        if taskset is not None:
            argv = [taskset, "--cpu-list", ",".join(map(str, sorted(options.cpus))), *argv]
        self._child = Caged(sandbox, cage, argv, stdout=self._words, stderr=subprocess.STDOUT)
        os.close(command_read)
        os.close(reply_write)
        self._commands, self._replies = command_write, reply_read
        self._data = b""
        task = EngineTask(
            model="/model",
            revision=setting.model.revision or "judged",
            config=setting.config,
            pack="/pack" if setting.pack is not None else "",
            libraries=[libraries[each.library] for each in kernels] if libraries else [],
            entries=[each.taken.entry for each in kernels],
            workload=setting.workload,
            stands_in=stands_in,
        )
        self._send(msgspec.json.encode(task))

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)
        os.close(self._replies)
        self._child.close()
        self._words.close()

    def wait_ready(self) -> None:
        self._answer(_START_S)

    def run(self) -> tuple[float, PassReport]:
        """One pass of the workload; seconds by the parent's clock."""
        began = time.perf_counter()
        self._send(msgspec.json.encode(EngineCommand(do="run")))
        reply = self._answer(_PASS_S)
        if reply.ran is None:
            raise self._failure("it said nothing of its pass")
        return time.perf_counter() - began, reply.ran

    def score(self, sequences: Sequence[Sequence[int]], together: int, chunk: int) -> list[Position]:
        command = EngineCommand(
            do="score", sequences=[list(tokens) for tokens in sequences], together=together, chunk=chunk
        )
        self._send(msgspec.json.encode(command))
        return self._answer(_PASS_S).scored

    def _send(self, line: bytes) -> None:
        try:
            data = line + b"\n"
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            raise self._failure("its process ended") from None

    def _answer(self, timeout_s: float) -> EngineReply:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._data:
            if not select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._failure(f"no answer within {timeout_s:.0f} s")
            part = os.read(self._replies, 1 << 20)
            if not part or len(self._data) > _MAX_REPLY:
                raise self._failure("its process ended" if not part else "its answer is too long")
            self._data += part
        line, _, self._data = self._data.partition(b"\n")
        try:
            reply = msgspec.json.decode(line, type=EngineReply)
        except msgspec.DecodeError as error:
            raise self._failure(f"its answer cannot be read: {error}") from None
        if reply.failed:
            raise self._failure(reply.failed)
        return reply

    def _failure(self, what: str) -> Exception:
        self._words.seek(0)
        said = self._words.read(1 << 20).decode(errors="replace").strip()[-400:]
        text = f"{what}: {said}" if said and "process" in what else what
        if self._is_candidate:
            return Rejected("crashed", f"in the engine: {text}")
        return StartupError(f"the judge's own engine failed: {text}")


def _pairs(baseline: _Engine, candidate: _Engine, seconds: float) -> dict[str, Ratio]:
    walls: tuple[list[float], list[float]] = ([], [])
    reports: tuple[list[PassReport], list[PassReport]] = ([], [])
    began = time.monotonic()
    for number in range(_MAX_PAIRS):
        if number >= _MIN_PAIRS and time.monotonic() - began > seconds:
            break
        for side in (0, 1) if number % 2 else (1, 0):
            taken, report = (baseline, candidate)[side].run()
            walls[side].append(taken)
            reports[side].append(report)
    ratios = {"workload": ratio(walls[0], walls[1])}
    for name, times in (("decode_tok_s", "decode_s"), ("prefill_tok_s", "prefill_s")):
        first, second = ([getattr(report, times) for report in side] for side in reports)
        if min(first) > 0 and min(second) > 0:
            ratios[name] = ratio(first, second)
    return ratios


def _agreement(
    right: tuple[list[Position], list[Position]],
    candidate: tuple[list[Position], list[Position]],
    first: PassReport,
    own: PassReport,
    noise: float,
    allowed: float,
) -> tuple[str, bool]:
    """Both scored the same tokens, decoding and in prefill; in words, and whether it is within the ``noise``
    floor at all positions but a share of ``allowed``."""
    found = [
        distance for mine, its in zip(candidate, right, strict=True) for distance in map(_distance, mine, its)
    ]
    wrong = sum(distance > noise for distance in found) / len(found)
    same = sum(len(_common(a, b)) for a, b in zip(first.tokens, own.tokens, strict=False))
    count = sum(map(len, first.tokens))
    text = (
        f"log-probabilities at {len(found)} positions differ by at most {max(found):.3g} (noise floor "
        f"{noise:.3g}); beyond it: {100 * wrong:.2f} %; greedy tokens equal up to {same} of {count}"
    )
    return text, wrong <= allowed


def _distance(one: Position, other: Position) -> float:
    """The largest difference in log-probability among tokens that both hold likely. Without any: the least by
    which they must differ, as each one's likeliest token is not among the other's."""
    known = dict(other.top)
    shared = [abs(value - known[token]) for token, value in one.top if token in known]
    if shared:
        return max(shared)
    if not one.top or not other.top:
        return float("inf")
    return max(0.0, one.top[0][1] - other.top[-1][1], other.top[0][1] - one.top[-1][1])


def _common(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """The longest common beginning."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


def _interpreter() -> dict[Path, str]:
    """This Python, its packages, this package, and what torch reads about the processor."""
    show = {Path(headrace.__file__).parent: "/app/headrace"}
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)):
        if not Path(prefix).is_relative_to("/usr"):
            show[Path(prefix)] = prefix
    cpu = Path("/sys/devices/system/cpu")
    return show | ({cpu: str(cpu)} if cpu.exists() else {})


def _model_files(folder: Path, scratch: Path) -> dict[Path, str]:
    """Each file by itself: those of a hub snapshot are links to elsewhere. What only its owner may read, the
    cage's own user may not: that is copied to ``scratch``, once."""
    show = {}
    for path in folder.iterdir():
        real = path.resolve()
        if os.geteuid() == 0 and real.is_file() and not real.stat().st_mode & stat.S_IROTH:
            copy = scratch / path.name
            if not copy.exists():
                shutil.copyfile(real, copy)
                copy.chmod(0o644)
            real = copy
        show[real] = f"/model/{path.name}"
    return show


def _config(model: ResolvedModel) -> dict[str, int]:
    found = msgspec.json.decode((model.folder / "config.json").read_bytes())
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, dict) else dict(found)


def _vocab_size(model: ResolvedModel) -> int:
    return int(_config(model).get("vocab_size", 32000))


def _max_len(model: ResolvedModel) -> int:
    return int(_config(model).get("max_position_embeddings", 2048))
