"""The ASGI application: keys and permits at the door, then a raw handler or an ordinary route."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from headrace.core.errors import EngineError, HeadraceError
from headrace.gateway.chat import chat_completions
from headrace.gateway.completions import completions
from headrace.gateway.errors import encode_error
from headrace.gateway.exchange import Disconnected, Exchange
from headrace.gateway.routes import create_routes
from headrace.gateway.sse import error_event
from headrace.gateway.state import Gateway
from headrace.gateway.tokenize import detokenize, tokenize

Handler = Callable[[Gateway, Exchange, bytes, float], Awaitable[None]]

POSTS: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def create_app(gateway: Gateway) -> App:
    """The gateway as an ASGI 3 application, without lifespan: whoever made ``gateway`` closes it."""
    return App(gateway)


class App:
    """Dispatches by path; every response carries ``x-request-id``."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._routes = create_routes(gateway)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "started without lifespan and websockets"
        exchange = Exchange(scope, receive, send)
        handler = POSTS.get(exchange.path)
        try:
            self._gateway.keys.check(exchange.path, exchange.authorization)
            if handler is None:
                await self._routes(scope, receive, _identified(send, exchange.request_id))
            elif scope["method"] == "POST":
                await self._post(handler, exchange)
            else:
                await self._wrong_method(exchange, scope["method"])
        except Disconnected:
            pass
        except HeadraceError as error:
            self._gateway.metrics.http_errors[str(error.status), error.kind] += 1
            await exchange.send_error(error)
        except Exception:
            await self._broken(exchange)

    async def _post(self, handler: Handler, exchange: Exchange) -> None:
        gateway = self._gateway
        arrival = time.perf_counter()
        gateway.admission.take()
        try:
            body = await exchange.read_body(gateway.max_body_bytes)
            await handler(gateway, exchange, body, arrival)
        finally:
            exchange.unwatch()
            gateway.admission.give(1, time.perf_counter() - arrival)

    async def _wrong_method(self, exchange: Exchange, method: str) -> None:
        kind = "invalid_request_error"
        self._gateway.metrics.http_errors["405", kind] += 1
        message = f"{method} is not allowed on {exchange.path}, POST is"
        body = encode_error(message, kind, None, "method_not_allowed")
        await exchange.send_json(body, 405, [(b"allow", b"POST")])

    async def _broken(self, exchange: Exchange) -> None:
        """Our own mistake: logged with its traceback, answered as a 500 or as the stream's last event."""
        request_id = exchange.request_id.decode()
        self._gateway.log.exception("request %s failed", request_id)
        error = EngineError(f"internal error in request {request_id}", code="internal_error")
        self._gateway.metrics.http_errors[str(error.status), error.kind] += 1
        if not exchange.started:
            await exchange.send_error(error)
        elif exchange.streaming:
            await exchange.send_events(error_event(error), last=True)


def _identified(send: Send, request_id: bytes) -> Send:
    async def send_with_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
        await send(message)

    return send_with_id
