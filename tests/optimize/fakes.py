"""A whole loop without a machine: a profile of three ops, a proposer that counts, a judge that knows.

``python -m tests.optimize.fakes FOLDER ROUNDS`` runs it as a process of its own that can be killed; each
stage adds a line to ``FOLDER/calls``, and where ``FOLDER/stop-at`` names such a line it stops and waits.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.core.packs import KernelEntry, PackConditions
from headrace.models.config import DecoderConfig, RopeSpec
from headrace.optimize.digest import candidate_digest
from headrace.optimize.journal import Journal
from headrace.optimize.keys import Keys
from headrace.optimize.loop import Judged, Limits, Loop, Stages
from headrace.optimize.packing import Winner, make_pack
from headrace.optimize.proposal import CandidateSource, Trial
from headrace.optimize.records import (
    CallShape,
    KernelProfile,
    Measurement,
    OpProfile,
    PhaseProfile,
    Published,
    Ratio,
    RolloutRecord,
    Roofs,
    Target,
    Verdict,
)
from headrace.optimize.registry import Registry
from headrace.optimize.rounds import Round, RoundStore
from headrace.optimize.targets import Tried, find_targets

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    norm_eps=1e-5,
    attention_scale=0.25,
    ropes=(RopeSpec("default", 10_000.0, 16),),
    layer_ropes=(0, 0, 0),
    sliding_windows=(None, None, None),
)
STEP_S = 10e-3
LAYER, MLP, HEAD = "decoder_layer", "decoder_layer/mlp_block", "logits_head"
RECOVERABLE = {LAYER: 5e-3, MLP: 2.5e-3, HEAD: 2e-3}
AFTER_LAYER = {LAYER: 0.5e-3, HEAD: 2e-3}


def op_profile(path: str, recoverable_s: float, *, rows: int = 1, phase: str = "decode") -> OpProfile:
    shape = CallShape(phase=phase, rows=rows, context=100, calls_per_step=3.0, dtype="float32", dims={})  # type: ignore[arg-type]
    total_s = 1.2 * recoverable_s
    return OpProfile(
        path=path,
        op=path.rpartition("/")[2].partition(".")[0],
        phase=phase,  # type: ignore[arg-type]
        calls_per_step=3.0,
        self_s=total_s,
        self_spread_s=0.0,
        total_s=total_s,
        share=total_s / STEP_S,
        flops=1e6,
        bytes=1e6,
        intensity=1.0,
        gbytes_per_s=10.0,
        gflops_per_s=10.0,
        roof_share=0.2,
        bound="memory",
        recoverable_s=recoverable_s,
        end_to_end_gain=STEP_S / (STEP_S - recoverable_s),
        shapes=[shape],
    )


def phase_profile(
    recoverable: dict[str, float], *, phase: str = "decode", rows: int = 1, num_steps: int = 100
) -> PhaseProfile:
    return PhaseProfile(
        phase=phase,  # type: ignore[arg-type]
        num_steps=num_steps,
        rows=rows,
        step_s=STEP_S,
        unprofiled_step_s=STEP_S,
        unnamed_s=1e-4,
        ops=[op_profile(path, seconds, rows=rows, phase=phase) for path, seconds in recoverable.items()],
    )


def kernel_profile(*phases: PhaseProfile) -> KernelProfile:
    return KernelProfile(
        model="tiny",
        revision="r",
        workload="decode",
        hardware="a machine",
        dtype="bfloat16",
        threads=2,
        source="engine",
        created="2026-01-01T00:00:00Z",
        roofs=Roofs(stream={1: 1e11}, gemm={"float32": 2e11}, method="none"),
        phases=list(phases) or [phase_profile(RECOVERABLE)],
    )


def ratio(median: float, spread: float = 0.01) -> Ratio:
    return Ratio(
        median=median,
        low=median - spread,
        high=median + spread,
        pairs=20,
        baseline_s=1.0,
        candidate_s=1 / median,
    )


@dataclass
class Climber:
    """Candidate n is ``speeds[n]`` times faster; a string: its verdict's reason; None: no more to try."""

    speeds: Sequence[float | str | None] = (1.1, "wrong_result", 1.5, 1.3)
    author: str = "climber"
    asked: list[tuple[str, float, int]] = field(default_factory=list)

    def propose(
        self, target: Target, best: Trial | None, history: Sequence[Trial], rng: random.Random
    ) -> CandidateSource | None:
        self.asked.append((target.op, best.speed if best is not None else 0.0, len(history)))
        speed = self.speeds[len(history)] if len(history) < len(self.speeds) else None
        if speed is None:
            return None
        source = f"// {speed} {target.op} {rng.random()}\n"
        return CandidateSource(
            files={"k.cpp": source},
            entry=KernelEntry(op=target.op, source="k.cpp"),
            author=self.author,
            parameters={"speed": str(speed)},
        )


@dataclass
class World:
    """Fake stages in ``folder``; ``end_to_end`` is what a speed alone comes to on the workload."""

    folder: Path
    end_to_end: Callable[[float], float] = lambda speed: 1 + (speed - 1) / 2
    rollout: Callable[[str], RolloutRecord] | None = None
    found_out: bool = False
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = RoundStore(self.folder / "rounds")
        self.keys = Keys(self.folder / "keys")
        self.registry = Registry(str(self.folder / "registry"), keys=self.keys)

    def loop(
        self,
        proposer: Climber,
        *,
        limits: Limits | None = None,
        say: Callable[[str], None] = print,
        base: str = "",
    ) -> Loop:
        stages = Stages(
            profile=self._profile,
            targets=self._targets,
            judge=self._judge,
            confirm=self._confirm,
            publish=self._publish,
            pack_folder=self.registry.fetch,
            rollout=self.rollout,
        )
        return Loop(
            self.store,
            stages,
            proposer,
            Journal(say),
            model="tiny",
            workload="decode",
            limits=limits,
            base=base,
        )

    def _called(self, what: str) -> None:
        self.calls.append(what)
        with (self.folder / "calls").open("a") as file:
            file.write(what + "\n")
        stop = self.folder / "stop-at"
        if stop.exists() and stop.read_text() == what:
            (self.folder / "stopped").touch()
            time.sleep(600)

    def _profile(self, base: Path | None, seconds: float) -> KernelProfile:
        self._called(f"profile {'base' if base else 'stock'}")
        return kernel_profile(phase_profile(RECOVERABLE if base is None else AFTER_LAYER))

    def _targets(self, profile: KernelProfile, tried: Sequence[Tried]) -> list[Target]:
        return find_targets(profile, CONFIG, tried, block_size=32)

    def _judge(self, folder: Path, target: Target, base: Path | None) -> Judged:
        self._called(f"judge {folder.name}")
        verdict = self._verdict(folder)
        return verdict, self._measurement(folder, {}) if verdict.passed else None

    def _verdict(self, folder: Path) -> Verdict:
        word = (folder / "k.cpp").read_text().split()[1]
        passed = word[0].isdigit()
        return Verdict(
            candidate=folder.name,
            digest=candidate_digest(folder),
            passed=passed,
            reason="ok" if passed else word,  # type: ignore[arg-type]
            detail="" if passed else "off by one",
            seconds=0.1,
            sandbox="none",
        )

    def _confirm(self, folder: Path, target: Target, base: Path | None) -> Judged:
        self._called(f"confirm {folder.name}")
        verdict = self._verdict(folder)
        if self.found_out:
            return msgspec.structs.replace(verdict, passed=False, reason="stale_result", detail="late"), None
        end_to_end = {"decode_tok_s": ratio(self.end_to_end(_speed(folder)))}
        return verdict, self._measurement(folder, end_to_end)

    def _measurement(self, folder: Path, end_to_end: dict[str, Ratio]) -> Measurement:
        return Measurement(
            candidate=folder.name,
            digest=candidate_digest(folder),
            alone={"decode/1": ratio(_speed(folder))},
            end_to_end=end_to_end,
            agreement="the same tokens",
            won=all(one.low > 1.005 for one in end_to_end.values()),
            detail="",
        )

    def _publish(self, winner: Winner, one: Round, profile: KernelProfile, base: Path | None) -> Published:
        self._called(f"publish {winner.folder.name}")
        folder = one.folder / "pack"
        folder.mkdir(exist_ok=True)
        make_pack(
            folder,
            winner,
            name=f"tiny-{one.id}",
            conditions=PackConditions(shapes={"hidden_size": CONFIG.hidden_size}),
            round_id=one.id,
            keys=self.keys,
            base=base,
        )
        identity = self.registry.publish(folder, approver="test")
        return Published(
            pack=identity, registry=self.registry.url, candidate=winner.folder.name, summary="faster"
        )


def _speed(folder: Path) -> float:
    return float((folder / "k.cpp").read_text().split()[1])


def entry_of(folder: Path) -> KernelEntry:
    return msgspec.json.decode((folder / "kernel.json").read_bytes(), type=KernelEntry)


def main() -> None:
    ends = World(Path(sys.argv[1])).loop(Climber()).run(int(sys.argv[2]))
    print([end.outcome for end in ends])


if __name__ == "__main__":
    main()
