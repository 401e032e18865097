"""The routes that do not generate: models, health, readiness, metrics, version, the API's description."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from headrace.core.errors import UnavailableError
from headrace.core.version import __version__
from headrace.gateway.openapi import describe
from headrace.gateway.sse import json_value

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway, ServedModel

Route = Callable[["Exchange"], Awaitable[None] | None]
"""Answers at once, or gives what has to be awaited for it."""

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_MODEL = "/v1/models/"


class Routes:
    """Finds what answers a GET."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())
        self._description = b""
        self._table: dict[str, Route] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/version": self._version,
            "/openapi.json": self._openapi,
        }

    def find(self, path: str) -> Route | None:
        if path.startswith(_MODEL):
            return self._model
        return self._table.get(path)

    def _models(self, exchange: Exchange) -> None:
        cards = [self._card(served, name) for served in self._gateway.models for name in served.names]
        exchange.send_json(json_value({"object": "list", "data": cards}))

    def _model(self, exchange: Exchange) -> None:
        name = exchange.path[len(_MODEL) :]
        exchange.send_json(json_value(self._card(self._gateway.model(name), name)))

    def _card(self, served: ServedModel, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "root": served.source,
            "parent": None,
            "max_model_len": served.max_model_len or None,
        }

    def _health(self, exchange: Exchange) -> None:
        exchange.send_json(b'{"status":"ok"}')

    def _ready(self, exchange: Exchange) -> None:
        """200 when at least one model has a replica, and which ones have."""
        models = []
        reasons = []
        for served in self._gateway.models:
            try:
                self._gateway.require(served)
            except UnavailableError as error:
                reasons.append(error.message)
                models.append({"id": served.names[0], "ready": False, "reason": error.message})
            else:
                models.append({"id": served.names[0], "ready": True, "reason": None})
        if len(reasons) < len(models):
            exchange.send_json(json_value({"status": "ready", "models": models}))
        else:
            exchange.send_error(UnavailableError("; ".join(dict.fromkeys(reasons))))

    async def _metrics(self, exchange: Exchange) -> None:
        exchange.send_whole(await self._gateway.metrics_page(), METRICS_TYPE)

    def _version(self, exchange: Exchange) -> None:
        exchange.send_json(json_value({"version": __version__}))

    def _openapi(self, exchange: Exchange) -> None:
        if not self._description:
            self._description = json_value(describe(__version__))
        exchange.send_json(self._description)
