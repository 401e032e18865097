"""What one gateway's handlers share: the models it serves, the dispatcher, limits and counters."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.core.errors import NotFoundError, UnavailableError
from headrace.core.knobs import GatewayConfig
from headrace.core.routing import UNKNOWN_MODEL_LEN, ModelInfo
from headrace.gateway.admission import Admission
from headrace.gateway.auth import Keys
from headrace.gateway.errors import decode_error
from headrace.gateway.fleet_metrics import fleet_families
from headrace.gateway.metrics import Counters, ModelCounters, page, sums
from headrace.gateway.outbox import Outbox
from headrace.gateway.prompts import INLINE_BYTES, Prompts, TextPool
from headrace.gateway.recorder import Recorder
from headrace.router.refusals import scaled_to_zero

if TYPE_CHECKING:
    from headrace.router.dispatcher import Dispatcher
    from headrace.text.tokenizer import Tokenizer

MEGABYTE = 1024 * 1024
REPORT_INTERVAL_S = 1.0
STATUS_TIMEOUT_S = 2.0


class _Named(msgspec.Struct, frozen=True):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


class ServedModel:
    """One model as callers see it: ``model`` is its name in the fleet, ``names`` what they may ask for.

    The first name is reported. Without a tokenizer its bodies pass through to servers that take text.
    """

    def __init__(
        self,
        model: str,
        names: Sequence[str],
        tokenizer: Tokenizer | None,
        dispatcher: Dispatcher,
        *,
        source: str = "",
    ) -> None:
        """``source`` is what it was loaded from, as the operator wrote it; empty: ``model``."""
        self.model = model
        self.source = source or model
        self.names = list(names) or [model]
        self.tokenizer = tokenizer
        self.prompts = None if tokenizer is None else Prompts(tokenizer)
        self.metrics = ModelCounters()
        self._dispatcher = dispatcher

    @property
    def text_only(self) -> bool:
        """Whether bodies go on as they are: no tokenizer here, or no replica that takes tokens."""
        if self.tokenizer is None:
            return True
        info = self._dispatcher.info(self.model)
        return info is not None and not info.tokens

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens; 0 as long as no replica has said it."""
        info = self._dispatcher.info(self.model)
        if info is None or info.max_model_len == UNKNOWN_MODEL_LEN:
            return 0
        return info.max_model_len

    def has_root(self, root_identity: bytes) -> bool:
        """Whether identities computed from this root still fit."""
        info = self._dispatcher.info(self.model)
        return info is not None and info.root_identity == root_identity

    def info(self) -> ModelInfo:
        """What its replicas say of it; UnavailableError while none is ready."""
        info = self._dispatcher.info(self.model)
        if info is not None and self._dispatcher.ready(self.model):
            return info
        name = self.names[0]
        if info is not None and not self._dispatcher.has_members(self.model):
            raise scaled_to_zero(name)
        what = "none has answered yet" if info is None else "all are down"
        raise UnavailableError(f"no replica of {name} is ready: {what}", hint="Try again soon; see /ready.")


class Gateway:
    """The models, the way to their replicas, limits and counters behind the routes.

    ``gateway_id`` tells this process's counters from those of others.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        models: Sequence[ServedModel],
        dispatcher: Dispatcher,
        log: logging.Logger,
        gateway_id: str = "",
    ) -> None:
        assert models, "a gateway serves at least one model"
        self.config = config
        self.models = list(models)
        self.dispatcher = dispatcher
        self.log = log
        self.outbox = Outbox(log)
        self.keys = Keys(config.api_key)
        self.admission = Admission(config.max_concurrent_requests)
        self.metrics = Counters(gateway_id=gateway_id or f"{random.getrandbits(64):016x}")
        for served in self.models:
            self.metrics.models[served.names[0]] = served.metrics
        self.texts = TextPool(
            inline=all(served.tokenizer is None or served.tokenizer.renders_inline for served in self.models)
        )
        self.recorder = None if config.record is None else _recorder(config, log)
        self.max_body_bytes = int(config.max_body_mb * MEGABYTE)
        self.max_backlog_bytes = int(config.max_response_backlog_mb * MEGABYTE)
        self.draining = False
        self._by_name = {name: served for served in reversed(self.models) for name in served.names}

    def model(self, name: str | None) -> ServedModel:
        """The model that answers to a name, the first for None; NotFoundError names what is served."""
        if name is None:
            return self.models[0]
        served = self._by_name.get(name)
        if served is None:
            known = [known for served in self.models for known in served.names]
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; served: {', '.join(known)}",
                param="model",
                code="model_not_found",
            )
        return served

    async def model_of(self, body: bytes) -> ServedModel:
        """The model that a JSON body asks for; an only one without looking: whoever reads the body checks."""
        if len(self.models) == 1:
            return self.models[0]
        if len(body) <= INLINE_BYTES:
            return self.model(_model_name(body))
        return self.model(await self.texts.off_loop(lambda: _model_name(body)))

    def require(self, served: ServedModel) -> ModelInfo:
        """``served.info()``; UnavailableError also while the gateway stops."""
        if self.draining:
            raise UnavailableError("the server is shutting down", code="shutting_down")
        return served.info()

    async def metrics_page(self) -> bytes:
        """The text of /metrics: the sums over all gateways, and each replica as the router sees it."""
        self.metrics.num_admitted = self.admission.in_use
        families = []
        reports: list[bytes] = []
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status = await self.dispatcher.placer.status()
                reports = await self.dispatcher.placer.reports()
        except (UnavailableError, TimeoutError):
            self.log.warning("the router does not answer: /metrics without replicas and other gateways")
        else:
            families = list(fleet_families(status, {served.model: served.names[0] for served in self.models}))
        return page(sums(self.metrics, reports), families)

    def report(self) -> None:
        """Gives this gateway's counters to the router, for the pages of others."""
        self.metrics.num_admitted = self.admission.in_use
        self.dispatcher.placer.report(self.metrics.encode())

    async def report_forever(self) -> None:
        """Reports from time to time; for gateways that are one of several."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_INTERVAL_S)

    def close(self) -> None:
        self.texts.close()
        if self.recorder is not None:
            self.recorder.close()


def _recorder(config: GatewayConfig, log: logging.Logger) -> Recorder:
    assert config.record is not None
    folder = Path(os.path.expanduser(config.record))
    max_bytes = int(config.record_mb * MEGABYTE)
    return Recorder(folder, max_answers=config.record_answers, max_bytes=max_bytes, log=log)


def _model_name(body: bytes) -> str | None:
    try:
        return _named.decode(body).model
    except (msgspec.DecodeError, RecursionError) as error:
        raise decode_error(error, body) from None
