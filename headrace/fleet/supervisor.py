"""The replicas that run on this machine: started together, watched, added, replaced and taken away.

    Supervisor ── set_endpoint, remove_endpoint ──► Registrar (the router, here or in its own process)
        │      ◄── status: who is ready, what runs where ──
        └── LocalReplica ── python -m headrace.replica

What leaves, leaves in this order: the router places nothing new there; what runs gets time to finish; what
still runs is handed over to others; the router forgets it; the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.core.deployment import ReplicaDeployment
from headrace.core.errors import (
    EngineError,
    InsufficientMemoryError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from headrace.core.knobs import LogConfig
from headrace.core.launch import MachineShare, ReplicaSpec
from headrace.core.machine import available_memory
from headrace.core.messages import Hello
from headrace.core.routing import Endpoint, FleetStatus, ReplicaStatus, Role
from headrace.core.words import count
from headrace.fleet.child import start_all, stop_all
from headrace.fleet.exchange import check_exchange, kv_listen
from headrace.fleet.greeting import greeting
from headrace.fleet.local import LocalReplica
from headrace.fleet.packs import Pack, PackHistory, VerifyPack, first_pack
from headrace.fleet.place import LocalModel, Place
from headrace.fleet.rollout import Rollout
from headrace.fleet.runtime_directory import RuntimeDirectory

log = logging.getLogger("headrace.fleet")

Report = Callable[[str], None]

MAX_REPLICAS = 64
POLL_S = 0.05
# The router reaches a replica that listens in milliseconds, unless it is busy or just starting itself.
REACH_TIMEOUT_S = 60.0
# A hand-over takes as long as the other replicas need to take the work.
HAND_OVER_S = 10.0


class Registrar(Protocol):
    """The router as the supervisor sees it; a Placer is one."""

    def set_endpoint(self, endpoint: Endpoint) -> None: ...
    def remove_endpoint(self, replica_id: str) -> None: ...
    async def status(self) -> FleetStatus:
        """UnavailableError while it does not answer."""


@dataclass(eq=False)
class _Managed:
    """One replica and what the router was told of it, while ``announced``; ``loading``: bytes of weights
    done and in all."""

    place: Place
    replica: LocalReplica
    endpoint: Endpoint
    announced: bool = False
    hello: Hello | None = None
    loading: tuple[int, int] = (0, 0)
    on_loading: Callable[[], None] = lambda: None

    @property
    def id(self) -> str:
        return self.place.replica_id


class Supervisor:
    """Owns every LocalReplica of one server. All calls happen in one event loop.

    ``scale``, ``reload``, ``roll_out`` and ``roll_back`` run one after the other; each reports lines about
    what it does and returns a last one. ``stop`` may come at any time and ends them. A process gets its
    share of cores and memory as it starts: of the number there are then; a reload shares anew.
    """

    def __init__(
        self,
        registrar: Registrar,
        models: Sequence[LocalModel],
        *,
        directory: RuntimeDirectory,
        grace_s: float,
        logs: LogConfig | None = None,
        verify_pack: VerifyPack | None = None,
    ) -> None:
        """``grace_s`` is the time that requests get to finish on a replica that leaves; sockets and packs lie
        in ``directory``, which the caller closes after ``stop``. ``verify_pack`` None: no pack is taken."""
        self._registrar = registrar
        self._models = list(models)
        self._directory = directory
        self._grace_s = grace_s
        self._logs = logs or LogConfig()
        self._managed: dict[str, _Managed] = {}  # by replica id
        self._starting: list[_Managed] = []
        self._memory_bytes = 0
        self._packs = PackHistory(directory.path / "packs", verify_pack)
        self._command = asyncio.Lock()
        self._stopping = False

    @property
    def model_names(self) -> list[str]:
        """Models that can have replicas here, whether they have any now or not."""
        return [model.name for model in self._models]

    @property
    def hellos(self) -> dict[str, Hello]:
        """What each replica said of itself when its process was first ready."""
        return {name: managed.hello for name, managed in self._managed.items() if managed.hello is not None}

    @property
    def pids(self) -> dict[str, int | None]:
        """The present process of each replica."""
        return {name: managed.replica.pid for name, managed in self._managed.items()}

    async def start(self, on_loading: Callable[[int, int], None] | None = None) -> None:
        """Starts every replica at once; returns when the router has reached them all.

        ``on_loading`` is told bytes of weights done and in all, of all replicas together. Raises the
        StartupError of the first that cannot start; none runs then.
        """
        self._memory_bytes = available_memory()
        places = [Place(model, plan) for model in self._models for plan in model.deployment.replicas]
        if places:
            await self._launch(places, len(places), on_loading)

    async def scale(self, model: str, replicas: int, report: Report, role: Role | None = None) -> str:
        """Brings the local replicas of a model (empty: the only one) to a number; the last ones leave first.

        ``role`` None: the only role that this model's replicas have. Raises what a new replica failed with;
        the fleet is then as it was.
        """
        async with self._exclusive(report):
            chosen = self._model(model)
            if not 0 <= replicas <= MAX_REPLICAS:
                raise InvalidRequestError(f"replicas must be in [0, {MAX_REPLICAS}], got {replicas}")
            role = role or self._only_role(chosen)
            present = [managed for managed in self._of_model(chosen) if managed.place.role == role]
            missing = replicas - len(present)
            if missing > 0:
                places = list(itertools.islice(self._free_places(chosen, role), missing))
                report(f"starting {', '.join(place.slot for place in places)}")
                await self._launch(places, len(self._managed) + missing)
            elif missing < 0:
                leaving = present[replicas:]
                await asyncio.gather(*(self._retire(managed, report) for managed in leaving))
            for line in self._lonely(chosen):
                report(line)
            noun = "replica" if role == "unified" else f"{role} replica"
            return f"{chosen.name} runs {count(replicas, noun)} (before: {len(present)})"

    async def reload(self, target: str, report: Report) -> str:
        """Replaces the replicas of a model, or one replica, by new processes, one after the other.

        ``target`` is a model, a replica, or empty for all. Each new one is ready before the old one leaves.
        Raises what a new replica failed with; those not yet replaced then stay.
        """
        async with self._exclusive(report):
            chosen = self._targets(target)
            for old in chosen:
                place = self._next_place(old.place)
                report(f"starting {place.replica_id} in place of {old.id}")
                await self._launch([place], len(self._managed))
                await self._retire(old, report)
            return f"reloaded {count(len(chosen), 'replica')}"

    async def roll_out(self, model: str, folder: str, approver: str, report: Report) -> str:
        """Has the replicas of a model (empty: the only one) run a pack, a canary first. Raises PackError,
        whose code says whether it was refused or rolled back."""
        async with self._exclusive(report):
            chosen = self._approved(model, approver)
            pack = await asyncio.to_thread(self._packs.admit, Path(folder))
            report(f"{pack} is verified; {approver} approved it for {chosen.name}")
            await self._rollout(chosen, pack, report).run()
            self._packs.rolled_out(chosen.name, pack)
            return f"{chosen.name} runs {pack}"

    async def roll_back(self, model: str, approver: str, report: Report) -> str:
        """Has them run again what they ran before the last roll-out."""
        async with self._exclusive(report):
            chosen = self._approved(model, approver)
            pack = self._packs.previous(chosen.name, self._first_pack(chosen))
            report(f"{approver} has {chosen.name} run {pack} again")
            await self._rollout(chosen, pack, report).run_unseen()
            self._packs.rolled_back(chosen.name)
            return f"{chosen.name} runs {pack} again"

    def kill(self, replica_id: str, pid: int) -> None:
        """Ends a process that does not answer any more, if it is still that replica's; it is replaced."""
        managed = self._managed.get(replica_id)
        if managed is not None:
            managed.replica.kill(pid)

    async def stop(self, grace_s: float) -> None:
        """Ends every replica, those that are starting too; what runs gets ``grace_s`` seconds to finish."""
        self._stopping = True
        everything = [*self._starting, *self._managed.values()]
        for managed in everything:
            self._withdraw(managed)
        await stop_all([managed.replica for managed in everything], grace_s)
        self._managed.clear()

    # Starting

    async def _launch(
        self,
        places: Sequence[Place],
        total: int,
        on_loading: Callable[[int, int], None] | None = None,
    ) -> None:
        """Starts replicas side by side, as parts of ``total``: all of them, or none and raises why."""
        share = MachineShare(num_replicas=total, memory_bytes=self._memory_bytes // total if total > 1 else 0)
        added = [self._make(place, share) for place in places]

        def tell_loading() -> None:
            if on_loading is not None:
                on_loading(*(sum(managed.loading[i] for managed in added) for i in (0, 1)))

        for managed in added:
            managed.on_loading = tell_loading
        self._starting += added
        try:
            await start_all([managed.replica for managed in added])
            for managed in added:
                managed.hello = await greeting(managed.replica.spec.socket)
                for other in [*self._of_model(managed.place.model), *added]:
                    if other.hello is not None:
                        check_exchange(managed.hello, other.hello)
            if self._stopping:
                raise UnavailableError("the server is shutting down")
            for managed in added:
                self._managed[managed.id] = managed
                managed.announced = True
                self._registrar.set_endpoint(managed.endpoint)
            await self._wait_reached({managed.id for managed in added})
        except BaseException as error:
            if isinstance(error, InsufficientMemoryError) and total > 1:
                error.hint = f"{error.hint}, or run fewer: {total} replicas share this machine's memory"
            for managed in added:
                self._withdraw(managed)
                self._managed.pop(managed.id, None)
            await stop_all([managed.replica for managed in added], 0.0)
            raise
        finally:
            self._starting = [managed for managed in self._starting if managed not in added]

    def _make(self, place: Place, share: MachineShare) -> _Managed:
        model, plan = place.model, place.plan
        spec = ReplicaSpec(
            replica_id=place.replica_id,
            model=model.name,
            folder=str(model.folder),
            revision=model.revision,
            socket=self._directory.socket(place.replica_id),
            engine=self._packs.engine(model.name, plan.engine),
            role=plan.role,
            kv_listen=kv_listen(
                plan, model.deployment.replicas, lambda: self._directory.socket(f"{place.replica_id}-kv")
            ),
            share=share,
            logs=self._logs,
        )
        endpoint = Endpoint(
            replica_id=place.replica_id,
            model=model.name,
            address=spec.socket,
            kind="headrace",
            role=plan.role,
            hardware=plan.hardware,
            price_per_hour=plan.price_per_hour,
        )

        def on_loading(done: int, total: int) -> None:
            managed.loading = done, total
            managed.on_loading()

        def on_restart() -> None:
            self._change(managed, num_restarts=replica.num_restarts)

        replica = LocalReplica(spec, on_loading=on_loading, on_restart=on_restart)
        managed = _Managed(place, replica, endpoint)
        return managed

    def _change(self, managed: _Managed, **changes: object) -> None:
        """Tells the router what is new about a replica, if it knows it."""
        managed.endpoint = msgspec.structs.replace(managed.endpoint, **changes)
        if managed.announced:
            self._registrar.set_endpoint(managed.endpoint)

    async def _wait_reached(self, names: set[str]) -> None:
        deadline = asyncio.get_running_loop().time() + REACH_TIMEOUT_S
        while True:
            seen = await self._seen()
            missing = [name for name in names if name not in seen or seen[name].member.state != "ready"]
            if not missing:
                return
            if self._stopping:
                raise UnavailableError("the server is shutting down")
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"the router did not reach {', '.join(missing)} in {REACH_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    # Leaving

    async def _retire(self, managed: _Managed, report: Report) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        self._change(managed, draining=True)
        report(f"{managed.id} takes nothing new and finishes what runs")
        if not await self._wait_idle(managed.id, self._grace_s):
            report(f"{managed.id} hands over what still runs after {self._grace_s:.0f} s")
            self._change(managed, hand_over=True)
            await self._wait_idle(managed.id, HAND_OVER_S)
        self._withdraw(managed)
        # It drains by itself too: a router that has just started may not know of all that runs there.
        await managed.replica.stop(max(0.0, deadline - loop.time()))
        self._managed.pop(managed.id, None)
        report(f"{managed.id} has ended")

    def _withdraw(self, managed: _Managed) -> None:
        """Has the router forget a replica, once."""
        if managed.announced:
            managed.announced = False
            self._registrar.remove_endpoint(managed.id)

    async def _wait_idle(self, replica_id: str, limit_s: float) -> bool:
        """Whether nothing is in flight there within ``limit_s`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            seen = (await self._seen()).get(replica_id)
            if seen is not None and seen.num_in_flight == 0:
                return True
            if self._stopping or loop.time() >= deadline:
                return False
            await asyncio.sleep(POLL_S)

    async def _seen(self) -> dict[str, ReplicaStatus]:
        """What the router knows of replicas, by id; nothing while it does not answer."""
        try:
            status = await self._registrar.status()
        except UnavailableError as error:
            log.debug("no status: %s", error)
            return {}
        return {replica.member.endpoint.replica_id: replica for replica in status.replicas}

    # Packs

    def _approved(self, model: str, approver: str) -> LocalModel:
        chosen = self._model(model)
        if not approver:
            raise InvalidRequestError("what replicas run is changed by somebody: name the approver")
        if not self._of_model(chosen):
            raise NotFoundError(f"{chosen.name} has no replica here")
        return chosen

    def _rollout(self, model: LocalModel, pack: Pack, report: Report) -> Rollout:
        subjects = [managed.replica for managed in self._of_model(model)]
        return Rollout(subjects, pack, self._packs.current(model.name, self._first_pack(model)), report)

    def _first_pack(self, model: LocalModel) -> Pack:
        hellos = [managed.hello for managed in self._of_model(model)]
        return first_pack(model.deployment.engine.pack, [hello for hello in hellos if hello is not None])

    # Who is meant

    @contextlib.asynccontextmanager
    async def _exclusive(self, report: Report) -> AsyncIterator[None]:
        if self._command.locked():
            report("waiting for the command before this one to end")
        async with self._command:
            if self._stopping:
                raise UnavailableError("the server is shutting down")
            yield

    def _model(self, name: str) -> LocalModel:
        """The model of that name; empty: the only one."""
        if not name and len(self._models) == 1:
            return self._models[0]
        if not self._models:
            raise NotFoundError(
                "no model has replicas here: other servers answer for all of them",
                hint="name a MODEL whose weights are on this machine: headrace serve MODEL --replicas 1",
            )
        known = {alias: model for model in self._models for alias in model.deployment.names}
        if name in known:
            return known[name]
        what = f"no model {name!r} has replicas here" if name else "say which model"
        raise NotFoundError(f"{what}; there are {_names(model.name for model in self._models)}")

    def _of_model(self, model: LocalModel) -> list[_Managed]:
        return [managed for managed in self._managed.values() if managed.place.model is model]

    def _targets(self, target: str) -> list[_Managed]:
        """The replicas that a reload is about: by replica, by slot, by model; empty: all."""
        if not target:
            return list(self._managed.values())
        named = [managed for managed in self._managed.values() if target in (managed.id, managed.place.slot)]
        if named:
            return named
        for model in self._models:
            if target in model.deployment.names:
                return self._of_model(model)
        names = _names([*(model.name for model in self._models), *self._managed])
        raise NotFoundError(f"no model or replica {target!r} runs here; there are {names}")

    def _only_role(self, model: LocalModel) -> Role:
        """The role of a model's replicas; InvalidRequestError where they have several."""
        roles = {managed.place.role for managed in self._of_model(model)}
        roles |= {plan.role for plan in model.deployment.replicas}
        if len(roles) > 1:
            error = InvalidRequestError(
                f"{model.name} has {' and '.join(sorted(roles))} replicas: say which", param="role"
            )
            error.hint = f"add --role {sorted(roles)[0]}"
            raise error
        return roles.pop() if roles else "unified"

    def _lonely(self, model: LocalModel) -> Iterator[str]:
        """What a model's roles lack to be of use, in words."""
        roles = {managed.place.role for managed in self._of_model(model)}
        if roles == {"decode"}:
            yield f"nothing prefills for {model.name} now: its decode replicas compute prompts themselves"
        if roles == {"prefill"}:
            yield f"{model.name} has no decode replica now: its prefill replicas do everything"

    def _free_places(self, model: LocalModel, role: Role) -> Iterator[Place]:
        """Where more replicas of a model can run, by the lowest numbers that are free."""
        taken = self._taken_names()
        for number in itertools.count():
            name = f"{model.deployment.prefix_of(role)}{number}"
            if name not in taken:
                yield Place(model, ReplicaDeployment(id=name, engine=model.deployment.engine, role=role))

    def _next_place(self, place: Place) -> Place:
        """The same slot for the process that follows."""
        taken = self._taken_names()
        while place.replica_id in taken:
            place = dataclasses.replace(place, generation=place.generation + 1)
        return place

    def _taken_names(self) -> set[str]:
        workers = {worker.id for model in self._models for worker in model.deployment.workers}
        slots = {managed.place.slot for managed in self._managed.values()}
        return {*self._managed, *slots, *workers}


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
