"""Who prefills for whom: what a deployment's roles need of each other, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from headrace.core.deployment import ModelDeployment, ReplicaDeployment, WorkerDeployment
from headrace.core.errors import UsageError
from headrace.core.knobs import FleetConfig
from headrace.core.routing import Role

MAX_REPLICAS = 64


def counts_of_flags(fleet: FleetConfig) -> dict[Role, int]:
    """How many local replicas of each role the flags ask for. Raises UsageError where they contradict."""
    if not fleet.prefill and not fleet.decode:
        return {"unified": fleet.replicas if fleet.replicas is not None else 0 if fleet.worker_urls else 1}
    if fleet.replicas:
        raise UsageError(
            f"--replicas {fleet.replicas} counts unified replicas, --prefill and --decode split their work: "
            "they exclude each other",
            hint="leave --replicas out, or mix roles in a --config file: give each of its replicas a role",
            param="--replicas",
        )
    if not fleet.decode:
        raise UsageError(
            f"--prefill {fleet.prefill} computes prompts for decode replicas, and there is none",
            hint="add --decode 1, or use --replicas for replicas that do both",
            param="--prefill",
        )
    if not fleet.prefill:
        raise UsageError(
            f"--decode {fleet.decode} takes prompts that prefill replicas computed, and there is none",
            hint="add --prefill 1, or use --replicas for replicas that do both",
            param="--decode",
        )
    if fleet.prefill + fleet.decode > MAX_REPLICAS:
        raise UsageError(
            f"--prefill {fleet.prefill} and --decode {fleet.decode} are more than the {MAX_REPLICAS} "
            "replicas that fit one server",
            param="--prefill",
        )
    return {"prefill": fleet.prefill, "decode": fleet.decode}


def alike(model: ModelDeployment, counts: Mapping[Role, int]) -> list[ReplicaDeployment]:
    """So many replicas of each role, which differ in nothing else."""
    return [
        ReplicaDeployment(id=f"{model.prefix_of(role)}{number}", engine=model.engine, role=role)
        for role, count in counts.items()
        for number in range(count)
    ]


def check_roles(model: ModelDeployment, where: Callable[[str], str] = lambda _: "") -> None:
    """Raises UsageError where a model's prefill and decode sides cannot work together.

    ``where`` gives the file and line of a replica or worker, by id, as the error is to begin.
    """
    _check_side(model.name if model.names else model.model, model.replicas, where)
    _check_workers(model, where)


def _check_side(name: str, replicas: Iterable[ReplicaDeployment], where: Callable[[str], str]) -> None:
    by_role: dict[Role, list[ReplicaDeployment]] = {}
    for replica in replicas:
        by_role.setdefault(replica.role, []).append(replica)
    givers = by_role.get("prefill", []) + by_role.get("unified", [])
    takers = by_role.get("decode", [])
    if takers and not givers:
        _refuse(
            where(takers[0].id),
            f"{name} has decode replicas ({_ids(takers)}) and none that prefills for them",
            "give one replica of the same model role: prefill, or leave their role out",
        )
    if "prefill" in by_role and not takers:
        _refuse(
            where(by_role["prefill"][0].id),
            f"{name} has prefill replicas ({_ids(by_role['prefill'])}) and no decode replica that takes "
            "what they compute",
            "give one replica of the same model role: decode, or leave their role out",
        )
    if not takers:
        return
    for replica in by_role.get("prefill", []) + takers:
        if not replica.engine.enable_prefix_caching:
            _refuse(
                where(replica.id),
                f"{replica.id} has role {replica.role} and prefix caching off: blocks from another replica "
                "have no place there",
                "turn enable_prefix_caching on, or leave the role out",
            )
    for taker in takers:
        if all(not _can_meet(giver, taker) for giver in givers):
            giver = givers[0]
            _refuse(
                where(taker.id),
                f"{giver.id} gives blocks over kv_connector {giver.engine.kv_connector}, and {taker.id} "
                f"takes them over {taker.engine.kv_connector}: they cannot meet",
                "set both to auto, or to the same",
            )


def _can_meet(giver: ReplicaDeployment, taker: ReplicaDeployment) -> bool:
    ours, theirs = giver.engine.kv_connector, taker.engine.kv_connector
    return giver.engine.enable_prefix_caching and ("auto" in (ours, theirs) or ours == theirs)


def _check_workers(model: ModelDeployment, where: Callable[[str], str]) -> None:
    """A server that is not ours exchanges blocks only with its like, over its engine's own transfer."""
    by_role: dict[Role, list[WorkerDeployment]] = {}
    for worker in model.workers:
        by_role.setdefault(worker.role, []).append(worker)
    pairs: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for role, other in pairs:
        ours, theirs = by_role.get(role, []), by_role.get(other, [])
        if not ours:
            continue
        local = [replica for replica in model.replicas if replica.role == other]
        if not theirs:
            words = f", and {_ids(local)} cannot exchange blocks with it" if local else ""
            _refuse(
                where(ours[0].id),
                f"worker {ours[0].id} has role {role}, and no worker has role {other}{words}",
                f"name a worker of the same kind with role: {other}, or leave its role out",
            )
        for worker in ours:
            if worker.kind is not None and worker.kind not in ("vllm", "sglang"):
                _refuse(
                    where(worker.id),
                    f"worker {worker.id} has role {role}, which a server of kind {worker.kind} cannot have",
                    "roles are for vllm and sglang",
                )
            kinds = {each.kind for each in theirs}
            if worker.kind is not None and None not in kinds and worker.kind not in kinds:
                _refuse(
                    where(worker.id),
                    f"worker {worker.id} is {worker.kind} with role {role}, and no {other} worker is: blocks "
                    "move only between servers of one kind",
                    f"name a {worker.kind} worker with role: {other}",
                )


def _ids(replicas: Iterable[ReplicaDeployment | WorkerDeployment]) -> str:
    return ", ".join(replica.id for replica in replicas)


def _refuse(where: str, message: str, hint: str) -> NoReturn:
    raise UsageError(f"{where}: {message}" if where else message, hint=hint)
