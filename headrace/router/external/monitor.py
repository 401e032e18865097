"""Watches one external server: is it there, what can it do, how busy is it, what does its cache hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from headrace.core.messages import CacheEvent, CacheSnapshot, Stats
from headrace.core.routing import Capabilities, Endpoint, ModelInfo


class MonitorListener(Protocol):
    """What the placer does with a server's news; all calls happen in the event loop and none blocks."""

    def model_info(self, model: str) -> ModelInfo | None:
        """The identity space that the model's replicas share now, if any is up."""

    def on_up(
        self,
        replica_id: str,
        *,
        instance: str,
        capabilities: Capabilities,
        model: ModelInfo,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        hardware: str,
    ) -> None:
        """It answers and is recognised; again with another ``instance`` when it restarted."""

    def on_down(self, replica_id: str, reason: str) -> None:
        """It does not answer; it is asked again for ever."""

    def on_stats(self, replica_id: str, stats: Stats) -> None: ...

    def on_events(self, replica_id: str, first_seq: int, events: Sequence[CacheEvent]) -> None:
        """Numbered without gaps within one instance: gaps at the server are healed here."""

    def on_snapshot(self, replica_id: str, snapshot: CacheSnapshot) -> None:
        """All that its cache holds: what was known before is void."""


class ExternalMonitor:
    """Probes, scrapes and subscribes, with back-off, for as long as it lives."""

    def __init__(self, endpoint: Endpoint, listener: MonitorListener, *, log: logging.Logger) -> None:
        self.endpoint = endpoint

    def start(self) -> None:
        """Begins to watch."""

    async def close(self) -> None:
        """Stops watching and closes every socket."""
