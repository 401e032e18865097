"""A whole gateway in text mode over stand-ins, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from headrace.core.knobs import GatewayConfig, RouterConfig
from headrace.core.routing import Endpoint
from headrace.gateway.server import serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.router.dispatcher import Dispatcher
from headrace.router.external import make_worker
from headrace.router.external.http_client import Call, Headers, HTTPClient, HTTPFailure
from headrace.router.external.monitor import ExternalMonitor
from headrace.router.placer import LocalPlacer
from headrace.text.tokenizer import Tokenizer
from tests.router.external.stand_in import Exchange, StandIn, until

LOG = logging.getLogger("test")
MODEL = "m"
CHAT = "/v1/chat/completions"


class TextServer(StandIn):
    """An OpenAI-compatible server that the tests steer: it streams ``num_chunks``, held at ``hold`` until
    released, dying at ``die``; ``status`` answers with an error instead."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.num_chunks = 4
        self.hold: int | None = None
        self.die: int | None = None
        self.half_event = False
        self.status = 200
        self.chunk_bytes = 0
        self.num_sent = 0
        self.num_gone = 0
        self.released = asyncio.Event()
        self.page("/v1/models", {"data": [{"id": MODEL, "owned_by": name, "max_model_len": 4096}]})
        self.post("/v1/chat/completions", self._answer_chat)
        self.post("/v1/completions", self._answer_chat)

    @property
    def asked(self) -> list[Exchange]:
        return self.of("/v1/chat/completions") + self.of("/v1/completions")

    async def _answer_chat(self, exchange: Exchange) -> None:
        if self.status != 200:
            exchange.reply(
                {"error": {"message": f"no, says {self.name}", "type": "x", "code": self.status}}, self.status
            )
            return
        body = exchange.json
        usage = {"prompt_tokens": 11, "completion_tokens": self.num_chunks,
                 "prompt_tokens_details": {"cached_tokens": 3}}  # fmt: skip
        if not body.get("stream"):
            if not await self._step(exchange, 0):
                return
            exchange.reply(
                {"object": "chat.completion", "choices": [{"finish_reason": "length"}], "usage": usage}
            )
            return
        exchange.start_stream()
        for place in range(self.num_chunks):
            await exchange._writer.drain()
            if not await self._step(exchange, place):
                return
            text = "x" * self.chunk_bytes or f"{self.name}{place}"
            exchange.event({"choices": [{"delta": {"content": text}, "finish_reason": None}]})
            self.num_sent += 1
        exchange.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            exchange.event({"choices": [], "usage": usage})
        exchange.end_stream()

    async def _step(self, exchange: Exchange, place: int) -> bool:
        if self.hold == place:
            waits = [asyncio.ensure_future(event.wait()) for event in (exchange.gone, self.released)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if exchange.gone.is_set():
            self.num_gone += 1
            return False
        if self.die == place:
            if self.half_event:
                exchange.chunk(b'data: {"choices": [{"de')
            await exchange._writer.drain()
            await asyncio.sleep(0.01)  # that what was written is read before the reset
            exchange.reset()
            return False
        return True


class Answer:
    """What a caller hears; a Receiver."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.failure: HTTPFailure | None = None
        self.done = asyncio.Event()
        self.call: Call | None = None

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in headers}

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.done.set()

    def on_failed(self, failure: HTTPFailure) -> None:
        self.failure = failure
        self.done.set()

    @property
    def events(self) -> list[Any]:
        """Every event as JSON, DONE as a string; all of them well-formed."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == "", self.body
        assert all(block.startswith("data: ") for block in blocks), blocks
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]

    @property
    def texts(self) -> list[str]:
        choices = [
            event["choices"][0] for event in self.events if isinstance(event, dict) and event.get("choices")
        ]
        return [choice["delta"]["content"] for choice in choices if "content" in choice["delta"]]

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) >= {"message", "type", "code"}
        return error


class Front:
    """Gateway, dispatcher and router over ``servers``."""

    def __init__(
        self,
        *servers: TextServer,
        config: RouterConfig | None = None,
        tokenizer: Tokenizer | None = None,
        others: Sequence[Endpoint] = (),
        **endpoint: Any,
    ) -> None:
        """``others`` are servers beside, as they are; with a tokenizer the gateway speaks tokens to them."""
        self.servers = servers
        self.router_config = config or RouterConfig()
        self._tokenizer = tokenizer
        self._others = others
        self._endpoint = endpoint

    async def __aenter__(self) -> Front:
        def make_monitor(endpoint: Endpoint, listener: Any, *, log: logging.Logger) -> ExternalMonitor:
            return ExternalMonitor(endpoint, listener, log=log, poll_s=0.05, min_backoff_s=0.05)

        self.placer = LocalPlacer(self.router_config, log=LOG, make_monitor=make_monitor)
        self.dispatcher = Dispatcher(self.placer, self.router_config, log=LOG, make_worker=make_worker)
        self.placer.start()
        self.dispatcher.start()
        for server in self.servers:
            self.placer.set_endpoint(
                Endpoint(replica_id=server.name, model=MODEL, address=server.url, **self._endpoint)
            )
        for other in self._others:
            self.placer.set_endpoint(other)
        served = ServedModel(MODEL, [MODEL, "alias"], self._tokenizer, self.dispatcher)
        config = GatewayConfig(port=0, shutdown_grace_s=0.2)
        self.gateway = Gateway(config, models=[served], dispatcher=self.dispatcher, log=LOG)
        self.metrics = served.metrics
        self._stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.ensure_future(
            serve(
                self.gateway,
                config,
                log=LOG,
                on_ready=ready.set_result,
                stop=self._stop,
                handle_signals=False,
            )
        )
        self.url = await ready
        self.caller = HTTPClient(self.url, log=LOG)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.caller.close()
        self._stop.set()
        await self._serving
        await self.dispatcher.close()
        await self.placer.close()

    async def up(self, num: int | None = None) -> None:
        """Waits until so many servers are ready; all by default."""
        wanted = len(self.servers) + len(self._others) if num is None else num

        def num_ready() -> int:
            return sum(member.state == "ready" for member in self.placer.fleet.members)

        await until(lambda: num_ready() >= wanted)

    def send(self, path: str = CHAT, headers: Headers | None = None, **fields: Any) -> Answer:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.send_raw(json.dumps(body).encode(), path, headers)

    def send_raw(self, body: bytes, path: str = CHAT, headers: Headers | None = None) -> Answer:
        answer = Answer()
        answer.call = self.caller.request("POST", path, headers or [], body, answer)
        return answer

    async def ask(self, path: str = CHAT, headers: Headers | None = None, **fields: Any) -> Answer:
        answer = self.send(path, headers, **fields)
        await finished(answer)
        return answer

    def num_leases(self) -> int:
        return sum(status.num_in_flight for status in self.placer.router.status().replicas)


async def finished(answer: Answer) -> None:
    async with asyncio.timeout(10):
        await answer.done.wait()
    assert answer.failure is None, answer.failure


@contextlib.asynccontextmanager
async def text_servers(*names: str):
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(TextServer(name)) for name in names]
