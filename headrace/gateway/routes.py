"""The ordinary routes, on Starlette: models, health, readiness, metrics, version, the API's description."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.core.version import __version__
from headrace.gateway.errors import encode_error, error_body, error_headers
from headrace.gateway.openapi import describe
from headrace.gateway.sse import json_value

if TYPE_CHECKING:
    from headrace.gateway.state import Gateway

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_routes(gateway: Gateway) -> Starlette:
    """An ASGI application for every route that does not generate."""
    created = int(time.time())
    description: list[bytes] = []

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "headrace",
            "root": gateway.model_name,
            "parent": None,
            "max_model_len": gateway.max_model_len or None,
        }

    async def models(request: HTTPRequest) -> Response:
        return _json({"object": "list", "data": [model_card(name) for name in gateway.served_names]})

    async def model(request: HTTPRequest) -> Response:
        return _json(model_card(gateway.check_model(request.path_params["name"])))

    async def health(request: HTTPRequest) -> Response:
        return _json({"status": "ok"})

    async def ready(request: HTTPRequest) -> Response:
        hello = gateway.require_replica()
        return _json({"status": "ready", "model": gateway.served_names[0], "replica": hello.replica_id})

    async def metrics(request: HTTPRequest) -> Response:
        return Response(gateway.metrics.page(), media_type=METRICS_TYPE)

    async def version(request: HTTPRequest) -> Response:
        return _json({"version": __version__})

    async def openapi(request: HTTPRequest) -> Response:
        if not description:
            description.append(json_value(describe(__version__)))
        return Response(description[0], media_type="application/json")

    async def on_error(request: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HeadraceError)
        if not (isinstance(error, UnavailableError) and request.url.path == "/ready"):
            gateway.metrics.http_errors[str(error.status), error.kind] += 1
        return _error(error_body(error), error.status, error_headers(error))

    async def on_http_exception(request: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        if status == 404:
            message, kind, code = f"no such route: {request.url.path[:200]}", "not_found_error", "not_found"
        elif status == 405:
            message, code = (
                f"{request.method} is not allowed on {request.url.path[:200]}",
                "method_not_allowed",
            )
            kind = "invalid_request_error"
        else:
            message, kind, code = str(error.detail), "invalid_request_error", "invalid_request"
        gateway.metrics.http_errors[str(status), kind] += 1
        headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        return _error(encode_error(message, kind, None, code), status, headers)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/openapi.json", openapi),
        ],
        exception_handlers={HeadraceError: on_error, HTTPException: on_http_exception},
    )


def _json(value: Any) -> Response:
    return Response(json_value(value), media_type="application/json")


def _error(body: bytes, status: int, headers: list[tuple[bytes, bytes]]) -> Response:
    response = Response(body, status_code=status, media_type="application/json")
    response.raw_headers += headers
    return response
