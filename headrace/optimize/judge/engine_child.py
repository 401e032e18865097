"""One engine of an end-to-end comparison, in the cage: the stock operators or the pack in use, and in one of
the two the candidate as well. A third one may say what is right: stock operators on weights in the form that
the candidate reads, with activations rounded as it says that it does.

    python -m headrace.optimize.judge.engine_child COMMANDS REPLIES      descriptors of pipes

Lines of JSON in both directions; the first command is the EngineTask. The parent times what lies between its
command and the reply, since the candidate could turn this process's clock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.knobs import EngineConfig
from headrace.core.messages import Score, Scores
from headrace.core.packs import NONE, KernelEntry, PackConditions, PackManifest
from headrace.core.request import pack_tokens
from headrace.engine.engine import Engine
from headrace.engine.packs import load_native_pack
from headrace.kernels.native.pack import bind_kernels, read_manifest
from headrace.kernels.table import OpTable
from headrace.optimize.judge.quantized import standing_in
from headrace.optimize.profile.workloads import Workload, run

NUM_TOP = 8


class EngineTask(msgspec.Struct, frozen=True, kw_only=True):
    """Paths are those in the cage; ``pack`` may be empty. ``entries`` and ``libraries`` are the candidate's
    kernels; ``stands_in``: its weights' form and rounding, and stock operators."""

    model: str
    revision: str
    config: EngineConfig
    pack: str
    libraries: list[str]
    entries: list[KernelEntry]
    workload: Workload
    stands_in: bool = False


class EngineCommand(msgspec.Struct, frozen=True, kw_only=True):
    """``run``: a pass of the workload. ``score``: ``sequences`` of tokens, ``together`` at a time, ``chunk``
    tokens a pass (0: all)."""

    do: str
    sequences: list[list[int]] = []
    together: int = 1
    chunk: int = 1


class PassReport(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and tokens of a pass by phase, by this process's clock; the tokens of each request."""

    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int
    tokens: list[list[int]]


class Position(msgspec.Struct, frozen=True, array_like=True):
    """What is said of the next token at one position: the likeliest tokens with log-probabilities."""

    top: list[tuple[int, float]]


class EngineReply(msgspec.Struct, frozen=True, kw_only=True):
    """``failed`` is empty unless the command failed."""

    failed: str = ""
    ran: PassReport | None = None
    scored: list[Position] = []


def serve(commands: int, replies: int) -> None:
    reader, writer = os.fdopen(commands, "rb"), os.fdopen(replies, "wb")

    def answer(reply: EngineReply) -> None:
        writer.write(msgspec.json.encode(reply) + b"\n")
        writer.flush()

    task = msgspec.json.decode(reader.readline(), type=EngineTask)
    try:
        engine = _engine(task)
    except Exception as error:
        return answer(EngineReply(failed=f"{type(error).__name__}: {error}"[:1000]))
    answer(EngineReply())
    admissions: Sequence[int] | None = None
    for line in reader:
        command = msgspec.json.decode(line, type=EngineCommand)
        try:
            if command.do == "run":
                done = run(engine, task.workload, admissions=admissions)
                admissions = done.admissions
                answer(EngineReply(ran=_report(done)))
            else:
                answer(EngineReply(scored=_score(engine, command)))
        except Exception as error:
            answer(EngineReply(failed=f"{type(error).__name__}: {error}"[:1000]))
    return None


def _engine(task: EngineTask) -> Engine:
    """The engine with the task's operators, loaded as a pack would be, from the library that was judged."""

    def load(folder: Path, ops: OpTable, model: Any) -> OpTable:
        if task.pack:
            ops = load_native_pack(Path(task.pack), ops, model)
        if task.stands_in:
            rounds = any(entry.activations == "int8" for entry in task.entries)
            return standing_in(ops, rounds=rounds)
        libraries = [Path(library) for library in task.libraries]
        if not libraries:
            return ops
        return bind_kernels(task.entries, libraries, ops, model.weights, source="candidate")

    pack = NONE
    if task.pack or task.entries:
        # what is loaded says in which form it reads weights, as a pack does
        kept = read_manifest(Path(task.pack))[0].kernels if task.pack else []
        pack = str(_stand_in(Path("/tmp/pack"), [*kept, *task.entries]))
    config = msgspec.structs.replace(task.config, pack=pack)
    return Engine(config, Path(task.model), revision=task.revision, load_pack=load)


def _stand_in(folder: Path, kernels: list[KernelEntry]) -> Path:
    """The folder of a pack that has a manifest and nothing else."""
    folder.mkdir()
    manifest = PackManifest(
        format=1,
        name="candidate",
        kind="kernels",
        kernels=kernels,
        conditions=PackConditions(),
        author="",
        round_id="",
        licence="",
        created="",
        files={},
    )
    (folder / "pack.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def _report(done: Any) -> PassReport:
    prefills = [step for step in done.steps if step.phase == "prefill"]
    decodes = [step for step in done.steps if step.phase == "decode"]
    return PassReport(
        prefill_s=sum(step.seconds for step in prefills),
        prefill_tokens=sum(step.prompt_tokens for step in prefills),
        decode_s=sum(step.seconds for step in decodes),
        decode_tokens=sum(step.output_tokens for step in decodes),
        tokens=done.tokens,
    )


def _score(engine: Engine, command: EngineCommand) -> list[Position]:
    count = len(command.sequences)
    groups = [command.together] * -(-count // command.together)
    score = Score(
        [pack_tokens(tokens) for tokens in command.sequences],
        groups,
        [engine.packs.active],
        command.chunk,
        NUM_TOP,
    )
    engine.score(score)
    while engine.scorer.busy:
        engine.scorer.advance(1.0)
    (ended,) = engine.scorer.take()
    if not isinstance(ended, Scores):
        raise RuntimeError(f"scoring failed: {ended.failed.message}")
    return [Position(each.top) for sequence in ended.scored[0].sequences for each in sequence]


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
