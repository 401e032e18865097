"""`headrace optimize kernels`, wired: the loop's stages on this machine's engine, judge and registry."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.control_client import ANSWER_TIMEOUT_S, ask_started
from headrace.cli.packs import roll_out
from headrace.core.control import Ps, PsReply
from headrace.core.errors import HeadraceError, PackError, StartupError, TimeUpError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.packs import NONE
from headrace.core.routing import FleetStatus
from headrace.models.config import DecoderConfig, DecoderShape
from headrace.models.families import covers, read_config
from headrace.models.fields import read_json
from headrace.models.resolve import resolve_model
from headrace.optimize.journal import Journal
from headrace.optimize.keys import Keys
from headrace.optimize.loop import Judged, Limits, Loop, Stages
from headrace.optimize.packing import Winner
from headrace.optimize.proposal import Proposer
from headrace.optimize.publishing import publish
from headrace.optimize.records import KernelProfile, Published, RolloutRecord, Target
from headrace.optimize.registry import Listed, Registry
from headrace.optimize.rounds import Round, RoundEnd, RoundStore
from headrace.optimize.targets import Tried, find_targets
from headrace.optimize.watch import Budget, latest_profile, watch

if TYPE_CHECKING:
    from headrace.optimize.profile.workloads import Workload

PROFILE_S = 12.0
"""Seconds of passes over the workload."""

PROFILE_SHARE = 0.2
"""Of the time that is left, where that is less."""


class KernelLoop:
    """One command's model, workload, proposer and places."""

    def __init__(
        self,
        *,
        model: str,
        workload: str,
        engine: EngineConfig,
        proposer: Proposer,
        wanted: Callable[[Target], bool],
        limits: Limits,
        rounds_dir: Path | None,
        registry_url: str,
        base: str,
        op: str,
        port: int | None,
        approver: str,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        resolved = resolve_model(model, dtype=engine.dtype)
        raw = read_json(resolved.folder / "config.json")
        if not covers(raw):
            raise UsageError(
                f"{model}: {raw.get('model_type')!r} runs on Transformers' definition, which has no op table",
                hint="kernels are written for the families that Headrace defines itself",
            )
        self._config: DecoderConfig = read_config(raw)
        self._folder = resolved.folder
        self._model, self._workload, self._engine = model, workload, engine
        self._name, self._served_name = resolved.name, ""
        self._proposer, self._limits, self._seed = proposer, limits, seed
        self._wanted = wanted
        self._op, self._port, self._approver, self._say = op, port, approver, say
        self._store = RoundStore(rounds_dir)
        self._keys = Keys()
        self._registry = Registry(registry_url, keys=self._keys)
        self._shipped = _shipped_folders(engine)
        self._base = self._find_base(base)

    def run(self, rounds: int, *, fresh: bool = False, minutes: float | None = None) -> list[RoundEnd]:
        limits = self._limits if minutes is None else replace(self._limits, minutes=minutes)
        loop = Loop(
            self._store,
            self._stages(),
            self._proposer,
            Journal(self._say),
            model=self._model,
            workload=self._workload,
            limits=limits,
            base=self._base,
            seed=self._seed,
        )
        return loop.run(rounds, fresh=fresh)

    def check_server(self) -> None:
        """Raises UnavailableError where the port of --rollout has no Headrace server, UsageError where that
        serves another model. Rounds take long; it would be known only after them."""
        if self._port is None:
            return
        try:
            reply = ask_started(self._port, Ps(), PsReply, timeout_s=ANSWER_TIMEOUT_S, say=self._say)
        except HeadraceError as error:
            error.hint = (
                f"start `headrace serve {self._model}` and name its port, or leave out --rollout: "
                "`headrace packs rollout` does it later"
            )
            raise
        self._served_name = self._find_served(reply.status)

    def _find_served(self, status: FleetStatus) -> str:
        """What the server calls this model. Its replicas look at a pack's shapes; here others are told apart
        by name and vocabulary."""
        own = {one.member.endpoint.model for one in status.replicas if one.member.endpoint.kind == "headrace"}
        sizes = {info.model: info.vocab_size for info in status.models}
        alike = sorted(name for name in own if sizes.get(name, 0) in (0, self._config.vocab_size))
        named = [name for name in alike if name in (self._model, self._name)]
        if len(alike) == 1 or named:
            return (named or alike)[0]
        served = ", ".join(sorted(own)) or "no model with replicas of its own"
        if alike:
            raise UsageError(
                f"--rollout {self._port}: that server has {served}; which of them is {self._model}?",
                hint=f"serve it under the name {self._name}",
            )
        raise UsageError(
            f"--rollout {self._port}: that server has {served}, and not {self._model}, whose vocabulary is "
            f"{self._config.vocab_size}",
            hint="name the port of a server of this model, or leave out --rollout",
        )

    def watch(
        self, *, rounds: int, every_s: float, minutes_a_day: float, targets: Mapping[str, float]
    ) -> None:
        """Stays until interrupted."""
        budget = Budget(minutes_a_day)
        seen_at: list[float] = []

        def look() -> KernelProfile | None:
            """A recorded workload is looked at again once its file has changed; others at the start alone."""
            path = Path(self._workload).expanduser()
            changed = path.stat().st_mtime if path.is_file() else 0.0
            if seen_at == [changed]:
                return None
            seen_at[:] = [changed]
            return self._profile(self._pack_folder(self._base))

        def start(minutes: float) -> Sequence[RoundEnd]:
            try:
                ends = self.run(rounds, minutes=min(minutes, self._limits.minutes or minutes))
            except TimeUpError as error:
                self._say(error.message)
                return []
            self._base = next((end.pack for end in reversed(ends) if end.pack), self._base)
            return ends

        self._say(f"watching {self._workload}; Ctrl+C ends it")
        watch(
            look=look,
            start=start,
            last=lambda: latest_profile(self._store, self._model, self._workload),
            budget_left=lambda: budget.left(self._store, datetime.now(UTC)),
            targets=targets,
            say=self._say,
            every_s=every_s,
        )

    def _stages(self) -> Stages:
        return Stages(
            profile=self._profile,
            targets=self._targets,
            judge=partial(self._judge, end_to_end=False),
            confirm=partial(self._judge, end_to_end=True),
            publish=self._publish,
            pack_folder=self._fetch,
            rollout=None if self._port is None else self._roll_out,
        )

    def _profile(self, base: Path | None, seconds_left: float = math.inf) -> KernelProfile:
        from headrace.llm import LLM
        from headrace.optimize.profile.collect import profile_engine

        deadline = time.monotonic() + seconds_left
        seconds = min(PROFILE_S, PROFILE_SHARE * seconds_left)
        knobs = {**msgspec.structs.asdict(self._engine), "pack": str(base) if base is not None else NONE}
        with LLM(self._model, **knobs) as llm:
            try:
                profile = profile_engine(
                    llm.engine,
                    self._requests(),
                    model=self._model,
                    seconds=seconds,
                    limit_s=deadline - time.monotonic(),
                )
            except TimeUpError as error:
                error.hint = "give it more --minutes, or a shorter --workload"
                raise
        del llm
        gc.collect()  # the weights, before the judge loads its own
        return profile

    def _requests(self) -> Workload:
        """The workload as it is now, for profile and judge alike."""
        from headrace.optimize.profile.workloads import load_workload
        from headrace.text.tokenizer import Tokenizer

        longest = self._config.max_position_embeddings
        return load_workload(
            self._workload,
            self._config.vocab_size,
            max_len=min(longest, self._engine.max_model_len or longest),
            encode=lambda text: Tokenizer.from_folder(self._folder, None).encode(text),
        )

    def _judge(self, folder: Path, target: Target, base: Path | None, *, end_to_end: bool) -> Judged:
        from headrace.optimize.judge.judge import judge
        from headrace.optimize.judge.options import JudgeOptions

        return judge(
            folder,
            target,
            baseline_pack=base,
            workload=self._requests() if end_to_end else None,
            end_to_end=end_to_end,
            options=JudgeOptions(threads=self._engine.threads or 0),
        )

    def _targets(self, profile: KernelProfile, tried: Sequence[Tried]) -> list[Target]:
        found = find_targets(
            profile,
            self._config,
            tried,
            block_size=self._engine.block_size,
            quantization=self._engine.quantization,
        )
        return [target for target in found if self._op in ("", target.op) and self._wanted(target)]

    def _publish(self, winner: Winner, one: Round, profile: KernelProfile, base: Path | None) -> Published:
        return publish(
            winner,
            one,
            self._registry,
            self._keys,
            dtype=profile.dtype,
            shapes=DecoderShape.of(self._config).as_dict(),
            approver=self._approver,
            base=base,
        )

    def _roll_out(self, pack: str) -> RolloutRecord:
        assert self._port is not None
        return roll_out(
            self._registry,
            pack,
            port=self._port,
            model=self._served_name,
            approver=self._approver,
            say=lambda line: self._say(f"  {line}"),
        )

    def _pack_folder(self, pack: str) -> Path | None:
        return self._fetch(pack) if pack else None

    def _fetch(self, pack: str) -> Path:
        """The folder of a pack that ships, or of one in the registry, checked."""
        return self._shipped[pack] if pack in self._shipped else self._registry.fetch(pack)

    def _find_base(self, base: str) -> str:
        """The id of the pack to begin from; ``latest``: the newest of the registry that suits this model and
        machine and builds on what ships, else what ships."""
        if base == NONE:
            return ""
        if base != "latest":
            return self._registry.find(base).id
        ships = next(iter(self._shipped), "")
        from headrace.kernels.native.build import cpu_features

        shapes, there = DecoderShape.of(self._config).as_dict(), cpu_features()
        for listed in reversed(self._registry.packs()):
            conditions = listed.manifest.conditions
            if conditions.shapes == shapes and set(conditions.cpu_features) <= there:
                try:
                    self._registry.fetch(listed.id)
                    if ships and not self._builds_on(listed, ships):
                        raise PackError(f"it does not build on pack {ships[:12]}, which ships")
                except StartupError as error:
                    self._say(f"pack {listed.id[:12]} is passed over: {error.message}")
                    continue
                return listed.id
        return ships

    def _builds_on(self, listed: Listed, base: str) -> bool:
        by_id = {one.id: one.manifest.builds_on for one in self._registry.packs()}
        pack = listed.manifest.builds_on
        while pack and pack != base:
            pack = by_id.get(pack, "")
        return pack == base


def _shipped_folders(engine: EngineConfig) -> dict[str, Path]:
    """Shipped packs that a server would take by itself, by id, the best first."""
    from headrace.kernels.native.shipped import find_shipped, shipped_folder

    dtype = "float32" if engine.dtype == "float32" else "bfloat16"
    found, _ = find_shipped(shipped_folder())
    return {pack.pack_id: pack.folder for pack in found if pack.manifest.conditions.dtype == dtype}
