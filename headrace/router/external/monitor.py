"""Watches one external server: is it there, what can it do, how busy is it, what does its cache hold.

down ── recognised ──► up ── health, load once a second ──► on_stats
 ▲                      │── cache events over ZeroMQ ─────► on_events, on_snapshot
 └── does not answer ───┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.core.identity import root_identity
from headrace.core.messages import CacheEvent, CacheSnapshot, Stats
from headrace.core.routing import Capabilities, Endpoint, ModelInfo
from headrace.router.external.faults import refused_key
from headrace.router.external.http_client import HTTPClient, HTTPFailure
from headrace.router.external.kv_blocks import BlockTranslator
from headrace.router.external.kv_events import EventLog, EventStream
from headrace.router.external.load import read_load
from headrace.router.external.recognise import SILENT_EVENTS_LIMIT, Recognised, recognise
from headrace.router.kv_traits import NO_TRAITS, KvTraits

POLL_S = 1.0
HOSTED_POLL_S = 15.0
MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
MAX_MISSES = 3
"""Polls that may go unanswered in a row: a busy server answers late. A refused connection counts at once."""

MAX_SILENT_BLOCKS = 16
"""Blocks of prompt that a server may compute without a word about its cache, before its events count as
lost on the way."""

DEFAULT_MAX_IN_FLIGHT = 256
DEFAULT_BLOCK_SIZE = 32
TEXT_BLOCK_TOKENS = 64
"""What a chunk of text in the text-keyed index counts for: 256 bytes at about 4 bytes a token."""


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
        kv: KvTraits = NO_TRAITS,
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

    def __init__(
        self,
        endpoint: Endpoint,
        listener: MonitorListener,
        *,
        log: logging.Logger,
        poll_s: float | None = None,
        min_backoff_s: float = MIN_BACKOFF_S,
    ) -> None:
        self.endpoint = endpoint
        self._listener = listener
        self._log = log
        self._poll_s = poll_s
        self._min_backoff_s = min_backoff_s
        self._client: HTTPClient | None = None
        self._runner: asyncio.Task[None] | None = None
        self._events: asyncio.Task[None] | None = None
        self._space: tuple[bytes, int] | None = None  # the identities that its blocks are told in
        self._life = f"{random.getrandbits(64):016x}"
        self._stats = Stats()
        self._hears_events = False

    def start(self) -> None:
        """Begins to watch."""
        self._client = HTTPClient(self.endpoint.address, api_key_env=self.endpoint.api_key_env, log=self._log)
        name = f"monitor-{self.endpoint.replica_id}"
        self._runner = asyncio.get_running_loop().create_task(self._run(self._client), name=name)

    async def close(self) -> None:
        """Stops watching and closes every socket."""
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        await self._unsubscribe()
        if self._client is not None:
            await self._client.close()

    async def _run(self, client: HTTPClient) -> None:
        delay = self._min_backoff_s
        told = ""
        while True:
            try:
                found = await recognise(client, self.endpoint)
            except (HTTPFailure, HeadraceError) as error:
                reason = _words(error)
                if reason != told:
                    told = reason
                    self._listener.on_down(self.endpoint.replica_id, reason)
            except Exception as error:  # whatever a strange server makes of us, it is asked again
                self._log.exception("%s cannot be recognised", self.endpoint.address)
                self._listener.on_down(self.endpoint.replica_id, f"{type(error).__name__}: {error}")
            else:
                delay = self._min_backoff_s
                told = await self._watch(client, found)
                self._listener.on_down(self.endpoint.replica_id, told)
            await asyncio.sleep(delay * random.uniform(0.75, 1.25))
            delay = min(2 * delay, MAX_BACKOFF_S)

    async def _watch(self, client: HTTPClient, found: Recognised) -> str:
        """Follows a server that is up; returns why it no longer is."""
        self._stats = Stats()
        self._hears_events = False
        first: Stats | None = None
        await self._up(found)
        poll_s = self._poll_s or (HOSTED_POLL_S if found.capabilities.kind == "openai" else POLL_S)
        misses = 0
        while True:
            try:
                status = await self._health(client, found)
                if status in (401, 403):
                    return _words(refused_key(self.endpoint.address, status, self.endpoint.api_key_env))
                if status >= 500:
                    return f"its health is status {status}"
                stats = await read_load(client, found) if found.capabilities.load else None
            except HTTPFailure as failure:
                misses += 1
                if failure.fault == "connect" or misses >= MAX_MISSES:
                    if not found.instance:
                        self._life = f"{random.getrandbits(64):016x}"  # who comes back may be another
                    return str(failure)
            else:
                misses = 0
                if stats is not None:
                    if _went_back(self._stats, stats):
                        self._life = f"{random.getrandbits(64):016x}"
                        return "it was restarted"
                    self._stats = stats
                    first = first or stats
                    self._listener.on_stats(self.endpoint.replica_id, stats)
                    if self._are_events_lost(found, first, stats):
                        found = _without_events(found)
                        self._log.warning("%s: %s", self.endpoint.address, SILENT_EVENTS_LIMIT)
                        await self._up(found)
                if self._space != self._space_now(found):
                    await self._up(found)
            await asyncio.sleep(min(poll_s, POLL_S) if misses else poll_s)  # soon known for what it is

    def _are_events_lost(self, found: Recognised, first: Stats, now: Stats) -> bool:
        """Whether it must have told of blocks since the first look, and nothing arrived."""
        if self._hears_events or not found.capabilities.cache_events:
            return False
        computed = now.computed_prompt_tokens - first.computed_prompt_tokens
        return computed > MAX_SILENT_BLOCKS * max(found.block_size, DEFAULT_BLOCK_SIZE)

    async def _health(self, client: HTTPClient, found: Recognised) -> int:
        path = "/v1/models" if found.capabilities.kind == "openai" else "/health"
        status, _ = await client.fetch("GET", path)
        return status

    async def _up(self, found: Recognised) -> None:
        endpoint = self.endpoint
        root, block_size = self._space = self._space_now(found)
        tokens = found.capabilities.tokens
        self._listener.on_up(
            endpoint.replica_id,
            instance=f"{found.instance}/{self._life}" if found.instance else self._life,
            capabilities=found.capabilities,
            model=ModelInfo(
                model=endpoint.model,
                max_model_len=found.max_model_len,
                block_size=block_size,
                root_identity=root,
                vocab_size=found.vocab_size,
                tokens=tokens,
            ),
            max_num_seqs=endpoint.max_in_flight or found.max_num_seqs or DEFAULT_MAX_IN_FLIGHT,
            # told in blocks of the space, as everything about this model is
            num_blocks=found.num_blocks * (found.block_size or block_size) // block_size,
            block_size=block_size,
            hardware=endpoint.hardware or found.hardware,
        )
        await self._unsubscribe()
        if found.sources is not None and found.capabilities.cache_events:
            address, replay, topic = found.sources
            events = EventLog(BlockTranslator(root, block_size), self)
            stream = EventStream(events, address, replay, topic=topic, log=self._log)
            name = f"events-{endpoint.replica_id}"
            self._events = asyncio.get_running_loop().create_task(stream.run(), name=name)

    def _space_now(self, found: Recognised) -> tuple[bytes, int]:
        """The identities of this model: those its replicas share, or ours to begin with."""
        info = self._listener.model_info(self.endpoint.model)
        if info is not None and (info.tokens or not found.capabilities.tokens):
            return info.root_identity, info.block_size
        if found.capabilities.tokens:
            block_size = found.block_size if found.block_size > 1 else DEFAULT_BLOCK_SIZE
        else:
            block_size = TEXT_BLOCK_TOKENS
        root = root_identity(
            model_revision=f"external:{self.endpoint.model}",
            kv_dtype="text" if not found.capabilities.tokens else "",
            kv_layout="",
            block_size=block_size,
        )
        return root, block_size

    async def _unsubscribe(self) -> None:
        task, self._events = self._events, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # From the events (BlockListener)

    def on_blocks(self, first_seq: int, events: list[CacheEvent]) -> None:
        self._hears_events = True
        self._listener.on_events(self.endpoint.replica_id, first_seq, events)

    def on_blocks_snapshot(self, snapshot: CacheSnapshot) -> None:
        self._listener.on_snapshot(self.endpoint.replica_id, snapshot)


def _without_events(found: Recognised) -> Recognised:
    capabilities = found.capabilities
    return replace(
        found,
        sources=None,
        capabilities=replace(
            capabilities, cache_events=False, limits=[*capabilities.limits, SILENT_EVENTS_LIMIT]
        ),
    )


def _went_back(before: Stats, now: Stats) -> bool:
    """Counters only grow within one process."""
    return now.prompt_tokens < before.prompt_tokens or now.generation_tokens < before.generation_tokens


def _words(error: Exception) -> str:
    if isinstance(error, HeadraceError) and error.hint:
        return f"{error.message} ({error.hint})"
    return str(error)
