"""What a process of ours and whoever starts it tell each other before there is a socket between them.

starter ──► process    ReplicaSpec, RouterSpec or GatewaySpec, one JSON line on its standard input
process ──► starter    StartEvent, one JSON line on its standard output for each stage of its start
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.core import errors
from headrace.core.knobs import EngineConfig, GatewayConfig, LogConfig, RouterConfig
from headrace.core.routing import Role


class MachineShare(msgspec.Struct, frozen=True, kw_only=True):
    """What part of the machine a replica is to content itself with, unless its knobs say otherwise.

    Cores, and on a card its memory, are divided by ``num_replicas``. ``memory_bytes`` of main memory hold
    weights and KV cache; 0: all that is free.
    """

    num_replicas: Annotated[int, Meta(ge=1)] = 1
    memory_bytes: int = 0


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` is the name it was asked for by, ``folder`` holds it, ``socket`` is the path to listen on.

    ``revision`` names the weights; empty: the replica takes their digest as it loads them. ``kv_listen`` is
    where it gives blocks to others (``unix:/path`` or ``tcp://host:port``); empty: nowhere.
    """

    replica_id: str
    model: str
    folder: str
    revision: str
    socket: str
    engine: EngineConfig
    role: Role = "unified"
    kv_listen: str = ""
    share: MachineShare = MachineShare()
    logs: LogConfig = LogConfig()


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A router process that listens on ``socket``; replicas are announced to it there."""

    socket: str
    router: RouterConfig
    logs: LogConfig = LogConfig()


class ServedModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a gateway serves: callers may ask for ``names``, the first is reported.

    ``model`` is its name in the fleet, ``source`` what it was loaded from, as it was given. ``folder`` holds
    its tokenizer; empty: text passes through. ``chat_template`` is a file that replaces the model's
    own template.
    """

    model: str
    names: list[str]
    source: str = ""
    folder: str = ""
    chat_template: str | None = None


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway process: accepts on the inherited descriptor ``listener``, and asks the router that listens
    on ``router_socket``."""

    gateway_id: str
    listener: int
    router_socket: str
    models: list[ServedModelSpec]
    gateway: GatewayConfig
    router: RouterConfig
    logs: LogConfig = LogConfig()


class StartEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """``loading`` tells bytes of weights ``done`` and in all; ``ready`` and ``error`` are the last.

    ``kind`` is the error's class in ``core.errors``.
    """

    event: Literal["loading", "ready", "error"]
    done: int = 0
    total: int = 0
    kind: str = ""
    message: str = ""
    hint: str | None = None
    param: str | None = None
    code: str | None = None

    @classmethod
    def of_error(cls, error: errors.HeadraceError) -> StartEvent:
        return cls(
            "error",
            kind=type(error).__name__,
            message=error.message,
            hint=error.hint,
            param=error.param,
            code=error.code,
        )

    def to_error(self) -> errors.HeadraceError:
        """The error that it tells of; EngineError for a kind that ends no start."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.StartupError)):
            kind = errors.EngineError
        return kind(self.message, hint=self.hint, param=self.param, code=self.code)
