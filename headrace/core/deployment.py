"""What one `headrace serve` is to run: models, their replicas on this machine, and servers beside them.

    Deployment
    └── ModelDeployment         a name in the fleet
        ├── ReplicaDeployment   a process of ours
        └── WorkerDeployment    another inference server, by URL

The command line builds it from flags or from a file (``cli/deployment_file.py``); the supervisor runs it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.core.knobs import EngineConfig
from headrace.core.routing import Endpoint, EngineKind, Role


def _field(description: str, **limits: Any) -> Meta:
    return Meta(description=description, extra={"heat": "cold"}, **limits)


Price = Annotated[float, _field("What it costs an hour, in any one currency.", ge=0)]
Hardware = Annotated[str, _field("Its class of machine in words; default: what it says of itself.")]


class ReplicaDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """One local replica; ``id`` is unique in the deployment."""

    id: str
    engine: EngineConfig
    role: Role = "unified"
    price_per_hour: float = 0.0
    hardware: str = ""


class WorkerDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """One server that is not ours, as a deployment file describes it."""

    url: Annotated[str, _field("Base URL of the server, such as http://10.0.0.5:8000.")] = ""
    id: Annotated[str, _field("Its name in the fleet; default: host and port.")] = ""
    kind: Annotated[EngineKind | None, _field("Which server it is; default: found out by asking it.")] = None
    remote_model: Annotated[str, _field("What the server calls the model; default: its only one.")] = ""
    role: Annotated[
        Role, _field("prefill computes prompts for decode; both must be the same kind of server.")
    ] = "unified"
    overflow: Annotated[bool, _field("Used only while the others are full.")] = False
    text_only: Annotated[bool, _field("Send it text even if it takes tokens.")] = False
    kv_events: Annotated[str, _field("ZeroMQ address of vLLM's KV events, such as tcp://10.0.0.5:5557.")] = ""
    kv_replay: Annotated[str, _field("ZeroMQ address that replays them.")] = ""
    bootstrap_port: Annotated[
        int, _field("Port at which decode servers meet a prefill server of SGLang's.", ge=0, le=65535)
    ] = 0
    price_per_hour: Price = 0.0
    hardware: Hardware = ""
    max_in_flight: Annotated[
        int, _field("Requests that it gets at once; 0: what it says of itself.", ge=0, le=100_000)
    ] = 0
    api_key_env: Annotated[str, _field("Environment variable that holds the server's key.")] = ""

    def endpoint(self, model: str, *, has_tokenizer: bool = True) -> Endpoint:
        """It as the router is told of it, serving ``model``; without a tokenizer here it is sent text."""
        return Endpoint(
            replica_id=self.id,
            model=model,
            address=self.url,
            kind=self.kind,
            remote_model=self.remote_model,
            role=self.role,
            overflow=self.overflow,
            text_only=self.text_only or not has_tokenizer,
            kv_events=self.kv_events,
            kv_replay=self.kv_replay,
            bootstrap_port=self.bootstrap_port,
            price_per_hour=self.price_per_hour,
            hardware=self.hardware,
            max_in_flight=self.max_in_flight,
            api_key_env=self.api_key_env,
        )


class ModelDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """One model behind the gateway.

    Callers may ask for ``names``; the first is its name in the fleet and is reported. ``model`` says where
    weights and tokenizer come from (short name, folder, hub id); empty: only its workers know. ``engine``
    is what replicas that are added later get, their ids are ``prefix_of`` their role and a number.
    """

    model: str
    names: list[str]
    replicas: list[ReplicaDeployment] = []
    workers: list[WorkerDeployment] = []
    engine: EngineConfig = EngineConfig()
    replica_prefix: str = "replica-"
    chat_template: str | None = None

    @property
    def name(self) -> str:
        """Its name in the fleet."""
        return self.names[0]

    def prefix_of(self, role: Role) -> str:
        """What the ids of its replicas begin with, unless they are given: replica-, prefill-, decode-."""
        prefix = self.replica_prefix
        return prefix if role == "unified" else f"{prefix.removesuffix('replica-')}{role}-"


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """All models of one server; names and replica ids are unique in it."""

    models: list[ModelDeployment]
