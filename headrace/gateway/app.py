"""What stands between a request and its handler: keys, permits, methods, and every way to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from headrace.core.errors import EngineError, HeadraceError, NotFoundError, UnavailableError
from headrace.gateway.chat import chat_completions
from headrace.gateway.completions import completions
from headrace.gateway.errors import encode_error
from headrace.gateway.exchange import Disconnected, Exchange
from headrace.gateway.routes import Routes
from headrace.gateway.state import Gateway
from headrace.gateway.tokenize import detokenize, tokenize

Handler = Callable[[Gateway, Exchange, bytes, float], Awaitable[None]]

POSTS: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
_KIND = "invalid_request_error"


class App:
    """Hands exchanges to handlers; whatever happens there, each exchange gets its answer."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._routes = Routes(gateway)
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}

    def handle(self, exchange: Exchange) -> None:
        """Answers now, or in a task; raises nothing."""
        gateway = self._gateway
        try:
            gateway.keys.check(exchange.path, exchange.authorization)
            handler = POSTS.get(exchange.path)
            if handler is None:
                self._get(exchange)
            elif exchange.method != "POST":
                self._wrong_method(exchange, "POST")
            elif gateway.draining:
                raise UnavailableError("the server is shutting down", code="shutting_down")
            else:
                gateway.admission.take()
                self._start(exchange, self._post(handler, exchange))
        except HeadraceError as error:
            self._fail(exchange, error)
        except Exception:
            self._broken(exchange)

    async def close(self) -> None:
        """Ends the handlers that still run; their callers have been told or are gone."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refused(self, status: int) -> None:
        """Counts an error answer to what was no request."""
        self._gateway.metrics.count_error(status, _KIND)

    def _start(self, exchange: Exchange, work: Awaitable[None]) -> None:
        self._tasks[exchange] = asyncio.ensure_future(self._answer(exchange, work))

    async def _answer(self, exchange: Exchange, work: Awaitable[None]) -> None:
        try:
            await work
            assert exchange.ended or exchange.disconnected, "a handler returned before its response ended"
        except Disconnected:
            pass
        except HeadraceError as error:
            self._fail(exchange, error)
        except Exception:
            self._broken(exchange)
        finally:
            del self._tasks[exchange]

    async def _post(self, handler: Handler, exchange: Exchange) -> None:
        gateway = self._gateway
        try:
            body = await exchange.read_body(gateway.max_body_bytes)
            await handler(gateway, exchange, body, exchange.arrival)
        finally:
            gateway.admission.give(1, time.perf_counter() - exchange.arrival)

    def _get(self, exchange: Exchange) -> None:
        route = self._routes.find(exchange.path)
        if route is None:
            raise NotFoundError(f"no such route: {exchange.path[:200]}")
        if exchange.method not in ("GET", "HEAD"):
            self._wrong_method(exchange, "GET, HEAD")
            return
        work = route(exchange)
        if work is not None:
            self._start(exchange, work)

    def _wrong_method(self, exchange: Exchange, allowed: str) -> None:
        self._gateway.metrics.count_error(405, _KIND)
        message = f"{exchange.method} is not allowed on {exchange.path[:200]}, {allowed} is"
        body = encode_error(message, _KIND, None, "method_not_allowed")
        exchange.send_json(body, 405, [(b"allow", allowed.encode())])

    def _fail(self, exchange: Exchange, error: HeadraceError) -> None:
        self._gateway.metrics.count_error(error.status, error.kind)
        exchange.fail(error)

    def _broken(self, exchange: Exchange) -> None:
        """Our own mistake: logged with its traceback."""
        request_id = exchange.request_id.decode()
        self._gateway.log.exception("request %s failed", request_id)
        self._fail(exchange, EngineError(f"internal error in request {request_id}", code="internal_error"))
