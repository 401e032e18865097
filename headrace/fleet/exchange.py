"""Whether replicas of one model can hand blocks to each other, and where."""

from __future__ import annotations

import os
from collections.abc import Callable

from headrace.core.deployment import ReplicaDeployment
from headrace.core.errors import UsageError
from headrace.core.messages import Hello


def kv_listen(
    replica: ReplicaDeployment, all_of_model: list[ReplicaDeployment], path: Callable[[], str]
) -> str:
    """Where a replica gives its blocks to others: whoever can compute prompts for decode replicas. ``path``
    makes one for a socket.

    A unified one does not open a port for that unless there are decode replicas, or it is told to.
    """
    engine = replica.engine
    if replica.role == "decode" or not engine.enable_prefix_caching:
        return ""
    if engine.kv_connector == "shm" or (engine.kv_connector == "auto" and hasattr(os, "memfd_create")):
        return "unix:" + path()
    wanted = replica.role == "prefill" or any(other.role == "decode" for other in all_of_model)
    return "tcp://127.0.0.1:0" if wanted or engine.kv_connector == "tcp" else ""


def check_exchange(one: Hello, other: Hello) -> None:
    """Raises UsageError where one that gives blocks and one that takes them would not understand each
    other, as their processes say themselves."""
    if one.role == other.role:
        return
    for what, ours, theirs in (
        ("keeps blocks as", one.kv_format, other.kv_format),
        ("names blocks after", one.root_identity.hex()[:16], other.root_identity.hex()[:16]),
    ):
        if ours != theirs:
            raise UsageError(
                f"{one.replica_id} ({one.role}) {what} {ours}, {other.replica_id} "
                f"({other.role}) {theirs}: they cannot exchange them",
                hint="give them the same weights, dtype, block_size and quantization",
            )
