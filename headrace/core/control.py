"""What the commands ``ps``, ``why``, ``scale``, ``reload`` and ``packs`` tell a running server, and its
answers.

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


class Rollout(msgspec.Struct, frozen=True, tag="rollout"):
    """Have the local replicas of ``model`` (empty: the only one) run the pack in ``folder``: a canary first.

    ``folder`` is an absolute path on the server's machine, ``approver`` names who wants it. The last word is
    Done, or a Refusal whose code says what became of it: PACK_REFUSED, nothing was changed;
    PACK_ROLLED_BACK, the canary slipped and what ran before runs again.
    """

    folder: str
    approver: str
    model: str = ""


class Rollback(msgspec.Struct, frozen=True, tag="rollback"):
    """Have the local replicas of ``model`` (empty: the only one) run again what they ran before the last
    roll-out."""

    approver: str
    model: str = ""


ToServer = Ps | Why | Scale | Reload | Rollout | Rollback

PACK_REFUSED = "pack_refused"
PACK_ROLLED_BACK = "pack_rolled_back"


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
