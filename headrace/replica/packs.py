"""What the fleet asks a replica about packs, and the answers that take longer than one turn of its loop."""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.messages import (
    AskRecorded,
    AskStepTimes,
    Failed,
    FromReplica,
    PackFailed,
    PackRetired,
    PackUsed,
    PreparePack,
    Recorded,
    RetirePack,
    Score,
    StepTimes,
    UsePack,
)
from headrace.engine.engine import Engine
from headrace.replica.connections import Connection

AboutPacks = PreparePack | UsePack | RetirePack | AskStepTimes | AskRecorded | Score


class PackDesk:
    """Every message gets one answer: at once from ``receive``, or later from ``take``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[str, Connection] = {}  # pack id → who has it prepared
        self._scoring: Connection | None = None

    def receive(self, connection: Connection, message: AboutPacks) -> FromReplica | None:
        """The answer; None: it comes later."""
        try:
            return self._do(connection, message)
        except HeadraceError as error:
            return PackFailed(Failed.of_error("", error))

    def take(self) -> list[tuple[Connection, FromReplica]]:
        """Answers that are ready now, with those who wait for them."""
        answers: list[tuple[Connection, FromReplica]] = []
        for pack_id, prepared in self._engine.packs.take():
            connection = self._waiting.pop(pack_id, None)
            if connection is None:
                self._engine.packs.drop(pack_id)
            else:
                answers.append((connection, prepared))
        for scores in self._engine.scorer.take():
            if self._scoring is not None:
                answers.append((self._scoring, scores))
            self._scoring = None
        return answers

    def forget(self, connection: Connection) -> None:
        """A peer is gone: what it had begun is for nobody."""
        self._waiting = {pack: peer for pack, peer in self._waiting.items() if peer is not connection}
        if self._scoring is connection:
            self._scoring = None
            self._engine.scorer.stop()

    def _do(self, connection: Connection, message: AboutPacks) -> FromReplica | None:
        engine = self._engine
        if isinstance(message, PreparePack):
            engine.packs.prepare(message.pack_id, Path(message.folder))
            self._waiting[message.pack_id] = connection
            return None
        if isinstance(message, Score):
            if self._scoring is not None:
                raise InvalidRequestError("other tokens are being scored", param="sequences")
            engine.score(message)
            self._scoring = connection
            return None
        if isinstance(message, UsePack):
            engine.use_pack(message.pack_id)
            return PackUsed(message.pack_id)
        if isinstance(message, RetirePack):
            engine.packs.retire(message.pack_id)
            return PackRetired(message.pack_id)
        if isinstance(message, AskRecorded):
            return Recorded(engine.recorded.sequences())
        times = engine.step_times
        return StepTimes(engine.packs.active, times.num_steps, times.medians())
