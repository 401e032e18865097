"""What the commands ``ps``, ``why``, ``scale`` and ``reload`` tell a running server, and its answers.

One request and one reply a connection, framed as in ``core.wire``, on a Unix socket that only the server's
user may open: ``control_path(port)``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from headrace.core.messages import Failed
from headrace.core.routing import Decision, FleetStatus, Role


class Ps(msgspec.Struct, frozen=True, tag="ps"):
    pass


class Why(msgspec.Struct, frozen=True, tag="why"):
    request_id: str


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Run ``replicas`` local replicas of ``model`` (empty: the only one); the rest are drained first.

    ``role`` None: the only role that there is.
    """

    replicas: int
    model: str = ""
    role: Role | None = None


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Replace the local replicas of a model, or one replica, by new processes, one after the other."""

    target: str = ""


ToServer = Ps | Why | Scale | Reload


class PsReply(msgspec.Struct, frozen=True, tag="ps"):
    status: FleetStatus


class WhyReply(msgspec.Struct, frozen=True, tag="why"):
    decisions: list[Decision]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """One line about what a long command is doing; more follow, then Done or Refusal."""

    line: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    line: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    failed: Failed
    hint: str | None = None


FromServer = PsReply | WhyReply | Progress | Done | Refusal


def control_path(port: int) -> Path:
    """The control socket of the server that listens on ``port``; its folder is the user's own."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/headrace-{os.getuid()}"
    return Path(base) / f"headrace-{port}.sock"
