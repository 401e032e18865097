"""The deployment that flags describe, or the ``models:`` of a ``--config`` file, checked line by line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from headrace.cli.config_file import FileValue, entries, items
from headrace.cli.flags import check_names, load_config
from headrace.cli.roles import MAX_REPLICAS, alike, check_roles, counts_of_flags
from headrace.core.deployment import (
    Deployment,
    Hardware,
    ModelDeployment,
    Price,
    ReplicaDeployment,
    WorkerDeployment,
)
from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig, FleetConfig, GatewayConfig
from headrace.core.routing import Role

# Replicas of one model answer the same request with the same tokens, and share the names of blocks.
SAME_IN_A_MODEL = ("dtype", "quantization", "block_size")
PARTS_OF_A_MODEL = ("served_model_name", "replicas", "prefill", "decode", "engine", "workers")


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str | None,
        msgspec.Meta(description="Short name, folder, .gguf file or hub id.", extra={"heat": "cold"}),
    ] = None
    chat_template: Annotated[
        str | None,
        msgspec.Meta(
            description="File with a Jinja chat template, instead of the model's own.", extra={"heat": "cold"}
        ),
    ] = None


class _Replica(msgspec.Struct, frozen=True, kw_only=True):
    id: Annotated[str, msgspec.Meta(description="Its name in the fleet.", extra={"heat": "cold"})] = ""
    role: Annotated[
        Role,
        msgspec.Meta(
            description="prefill computes prompts for decode replicas; unified does both.",
            extra={"heat": "cold"},
        ),
    ] = "unified"
    price_per_hour: Price = 0.0
    hardware: Hardware = ""


class _Sources(msgspec.Struct, frozen=True):
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    file: Mapping[str, FileValue]

    def engine(self, *layers: Mapping[str, FileValue]) -> EngineConfig:
        """Flag beats environment beats file; in the file, what stands further inside beats the rest."""
        merged = dict(self.file)
        for layer in layers:
            merged |= layer
        return load_config(EngineConfig, self.flags, self.environment, merged)


class _Taken:
    """Where each name of one kind was used first."""

    def __init__(self, what: str, hint: str) -> None:
        self._what = what
        self._hint = hint
        self._first: dict[str, str] = {}

    def add(self, name: str, where: str) -> None:
        if name in self._first:
            raise UsageError(
                f"{where}: {self._what} {name!r} is used twice (first at {self._first[name]})",
                hint=self._hint,
            )
        self._first[name] = where

    def where(self, name: str) -> str:
        """File and line of its first use."""
        return self._first[name]


def deployment_of_flags(
    model: str | None, engine: EngineConfig, gateway: GatewayConfig, fleet: FleetConfig, default_model: str
) -> Deployment:
    """One model with replicas alike, and the servers at ``--worker-urls`` and ``--overflow-urls``.

    Without a model beside worker URLs it has no name yet: its workers know it.
    """
    counts = counts_of_flags(fleet)
    replicas = sum(counts.values())
    if not replicas and not fleet.worker_urls:
        raise UsageError(
            "--replicas 0 leaves nothing to answer requests",
            hint="give --replicas 1 or more, or --worker-urls",
            param="--replicas",
        )
    if model is None and (replicas or not fleet.worker_urls):
        model = default_model
    name = gateway.served_model_name or model
    taken = _Taken("worker URL", "leave one of them out")
    workers = []
    for flag, urls in (("--worker-urls", fleet.worker_urls), ("--overflow-urls", fleet.overflow_urls)):
        for text in urls:
            url = _checked_url(text, flag)
            taken.add(url, flag)
            workers.append(
                WorkerDeployment(
                    url=url,
                    id=_worker_id(url),
                    overflow=flag == "--overflow-urls",
                    api_key_env=fleet.worker_api_key_env or "",
                )
            )
    deployment = ModelDeployment(
        model=model or "",
        names=[name] if name else [],
        workers=workers,
        engine=engine,
        chat_template=gateway.chat_template,
    )
    deployment = msgspec.structs.replace(deployment, replicas=alike(deployment, counts))
    check_roles(deployment)
    return Deployment(models=[deployment])


def deployment_of_file(
    models: FileValue,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, FileValue],
) -> Deployment:
    """What ``models:`` describes; ``file`` holds the other keys, whose engine settings are defaults here.

    Raises UsageError with file and line for whatever is wrong.
    """
    sources = _Sources(flags, environment, file)
    found = items(models, "models")
    if not found:
        raise UsageError(f"{models.where}: models needs at least one model", hint="write `- model: NAME`")
    names = _Taken("served model name", "give one of the models another served_model_name")
    ids = _Taken("replica id", "give one of them another id")
    return Deployment(models=[_model(item, sources, names, ids, alone=len(found) == 1) for item in found])


def _model(item: FileValue, sources: _Sources, names: _Taken, ids: _Taken, *, alone: bool) -> ModelDeployment:
    values = entries(item, "a model")
    parts = {key: values.pop(key, None) for key in PARTS_OF_A_MODEL}
    check_names([_Model], {}, values, also=parts)
    model = load_config(_Model, {}, {}, values)
    if not model.model:
        _refuse(item, "a model needs `model:`", "name a short name, folder, .gguf file or hub id")
    served = _served_names(parts["served_model_name"]) or [model.model]
    for name in served:
        names.add(name, (parts["served_model_name"] or values["model"]).where)
    own = entries(parts["engine"], "engine") if parts["engine"] is not None else {}
    check_names([EngineConfig], {}, own)
    engine = sources.engine(own)
    prefix = "replica-" if alone else re.sub(r"[^\w.-]+", "-", served[0].rsplit("/", 1)[-1]) + "-"
    workers = (
        [_worker(worker, ids) for worker in items(parts["workers"], "workers")] if parts["workers"] else []
    )
    deployment = ModelDeployment(
        model=model.model,
        names=served,
        workers=workers,
        engine=engine,
        replica_prefix=prefix,
        chat_template=model.chat_template,
    )
    if parts["prefill"] is not None or parts["decode"] is not None:
        replicas = _split(parts, deployment, ids)
    else:
        default = 0 if workers else 1
        replicas = _replicas(parts["replicas"], item, sources, own, deployment, ids, default=default)
    if not replicas and not workers:
        _refuse(
            parts["replicas"] or item,
            f"{served[0]} has neither replicas nor workers",
            "give replicas: 1 or more, or name workers",
        )
    deployment = msgspec.structs.replace(deployment, replicas=replicas)
    check_roles(deployment, ids.where)
    return deployment


def _split(
    parts: Mapping[str, FileValue | None], model: ModelDeployment, ids: _Taken
) -> list[ReplicaDeployment]:
    """``prefill: P`` and ``decode: D``: so many replicas of each role, alike but for it."""
    given = {name: value for name in ("prefill", "decode") if (value := parts[name]) is not None}
    if (both := parts["replicas"]) is not None:
        _refuse(
            both,
            f"replicas excludes {' and '.join(given)}",
            "leave it out, or list all under replicas: and give each its role:",
        )
    fleet = load_config(FleetConfig, {}, {}, given)
    replicas = alike(model, {"prefill": fleet.prefill, "decode": fleet.decode})
    for replica in replicas:
        ids.add(replica.id, (given.get(replica.role) or next(iter(given.values()))).where)
    return replicas


def _served_names(value: FileValue | None) -> list[str]:
    if value is None:
        return []
    listed = [value] if isinstance(value.value, str) else items(value, "served_model_name")
    for name in listed:
        if not isinstance(name.value, str) or not name.value:
            _refuse(name, f"served_model_name needs a text, got {name.value!r}", "quote it")
    return [name.value for name in listed]


def _replicas(
    value: FileValue | None,
    model: FileValue,
    sources: _Sources,
    own: Mapping[str, FileValue],
    deployment: ModelDeployment,
    ids: _Taken,
    *,
    default: int,
) -> list[ReplicaDeployment]:
    if value is None or isinstance(value.value, int):
        count = default if value is None else value.value
        if isinstance(count, bool) or not 0 <= count <= MAX_REPLICAS:
            _refuse(
                value or model,
                f"replicas: expected a number from 0 to {MAX_REPLICAS} or a list, got {count}",
                "a list gives each replica its own settings",
            )
        named = alike(deployment, {"unified": count})
        for replica in named:
            ids.add(replica.id, (value or model).where)
        return named
    replicas: list[ReplicaDeployment] = []
    for item in items(value, "replicas"):
        values = entries(item, "a replica")
        check_names([_Replica, EngineConfig], {}, values)
        settings = load_config(_Replica, {}, {}, values)
        number = sum(other.role == settings.role for other in replicas)
        replica = ReplicaDeployment(
            id=settings.id or f"{deployment.prefix_of(settings.role)}{number}",
            engine=sources.engine(own, values),
            role=settings.role,
            price_per_hour=settings.price_per_hour,
            hardware=settings.hardware,
        )
        ids.add(replica.id, values.get("id", item).where)
        for name in SAME_IN_A_MODEL:
            first = (replicas[0] if replicas else replica).engine
            if getattr(first, name) != getattr(replica.engine, name):
                _refuse(
                    values.get(name, item),
                    f"{name} is {getattr(replica.engine, name)} in {replica.id} and {getattr(first, name)} "
                    f"in {replicas[0].id}: replicas of one model must agree in it",
                    "set it under engine:, or make it a model of its own",
                )
        replicas.append(replica)
    return replicas


def _worker(item: FileValue, ids: _Taken) -> WorkerDeployment:
    values = entries(item, "a worker")
    check_names([WorkerDeployment], {}, values)
    if "url" not in values:
        _refuse(
            item, "a worker needs `url:`", "give the base URL of the server, such as http://10.0.0.5:8000"
        )
    worker = load_config(WorkerDeployment, {}, {}, values)
    url = _checked_url(worker.url, f"{values['url'].where}: url")
    if worker.kind == "headrace":
        _refuse(
            values["kind"],
            "kind headrace is for our own replicas",
            "put another Headrace behind this one as kind: openai",
        )
    for name in ("kv_events", "kv_replay"):
        address = getattr(worker, name)
        if address and not re.fullmatch(r"(tcp|ipc)://\S+", address):
            _refuse(values[name], f"{name}: expected tcp://HOST:PORT or ipc://PATH, got {address!r}", "")
    if worker.kv_replay and not worker.kv_events:
        _refuse(values["kv_replay"], "kv_replay needs kv_events", "give the address of the events as well")
    worker = msgspec.structs.replace(worker, url=url, id=worker.id or _worker_id(url))
    ids.add(worker.id, values.get("id", values["url"]).where)
    return worker


def _checked_url(text: str, where: str) -> str:
    """The base URL without a trailing slash or ``/v1``, which OpenAI's clients write."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or re.search(r"\s", text):
        raise UsageError(
            f"{where}: expected a base URL, got {text!r}", hint="such as http://10.0.0.5:8000", param=where
        )
    if parts.username or parts.password:
        raise UsageError(
            f"{where}: a URL must not hold a password",
            hint="put the key into an environment variable and name that: --worker-api-key-env, api_key_env",
            param=where,
        )
    return text.rstrip("/").removesuffix("/v1")


def _worker_id(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc + parts.path


def _refuse(value: FileValue, message: str, hint: str) -> NoReturn:
    raise UsageError(f"{value.where}: {message}", hint=hint or None)
