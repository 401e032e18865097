"""A small tokenizer with a chat template, and a whole gateway over scripted replicas, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.core.knobs import GatewayConfig, RouterConfig
from headrace.core.routing import Endpoint
from headrace.gateway.server import serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.router.dispatcher import Dispatcher
from headrace.router.placer import LocalPlacer
from headrace.router.replica_client import ReplicaClient
from headrace.text.tokenizer import Tokenizer
from tests.gateway.fake_replica import FakeReplica, Plan

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["The capital of France is Paris.", "hello world, hello there", "one two three four five six"] * 4
EOS = 2
MODEL = "tiny-model"
CHAT = "/v1/chat/completions"
Value = TypeVar("Value")


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of 400 tokens in Hugging Face's files; every byte has a token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size()}))
    return folder


class Stack:
    """Gateway and scripted replicas on an event loop of their own; tests talk to it as any client would.

    ``replica`` is the first of ``replicas``, ``client`` the router's connection to it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        config: GatewayConfig | None = None,
        *,
        router: RouterConfig | None = None,
        models: Mapping[str, tuple[str, ...]] | None = None,
        num_replicas: int = 1,
        with_replica: bool = True,
        **replica_options: Any,
    ) -> None:
        """``models``: the names that callers may use, by the name in the fleet; ``num_replicas`` of each."""
        self.tokenizer = tokenizer
        self.config = config or GatewayConfig(port=0, shutdown_grace_s=0.5)
        self.router_config = router or RouterConfig()
        self.models = models or {MODEL: ("tiny", "other-name")}
        self.log = logging.getLogger("headrace.test")
        self._folder = folder
        self._num_replicas = num_replicas
        self._with_replica = with_replica
        self._replica_options = {"vocab_size": tokenizer.vocab_size, "eos": EOS, **replica_options}
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="stack")

    def __enter__(self) -> Stack:
        self._thread.start()
        self._ready.wait(20)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has stopped by itself, just now
                self.loop.call_soon_threadsafe(self.stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    def _main(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()
        self.placer = LocalPlacer(self.router_config, log=self.log)
        self.dispatcher = Dispatcher(self.placer, self.router_config, log=self.log)
        self.placer.start()
        self.dispatcher.start()
        self.replicas = []
        for model in self.models:
            for _ in range(self._num_replicas):
                await self._add_replica(model)
        served = [
            ServedModel(model, names, self.tokenizer, self.dispatcher) for model, names in self.models.items()
        ]
        self.gateway = Gateway(self.config, models=served, dispatcher=self.dispatcher, log=self.log)
        try:
            await serve(
                self.gateway,
                self.config,
                log=self.log,
                on_ready=self._on_ready,
                stop=self.stop,
                handle_signals=False,
            )
        finally:
            await self.dispatcher.close()
            await self.placer.close()
            for replica in self.replicas:
                await replica.close()

    async def _add_replica(self, model: str) -> None:
        replica_id = f"fake-{len(self.replicas)}"
        path = str(self._folder / f"{replica_id}.sock")
        replica = FakeReplica(path, replica_id=replica_id, **self._replica_options)
        self.replicas.append(replica)
        if self._with_replica:
            await replica.start()
        self.placer.set_endpoint(Endpoint(replica_id=replica_id, model=model, address=path))
        if self._with_replica and replica.greets:
            client = self.placer.connection(replica_id)
            assert client is not None
            await client.wait_ready(10)

    @property
    def replica(self) -> FakeReplica:
        return self.replicas[0]

    @property
    def client(self) -> ReplicaClient:
        client = self.placer.connection("fake-0")
        assert client is not None
        return client

    def _on_ready(self, address: str) -> None:
        self.address = address
        self.port = int(address.rpartition(":")[2])
        self._ready.set()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def wait_for(self, condition: Callable[[], Any], what: str = "condition") -> None:
        """Waits until something holds in the server's loop."""

        async def poll() -> None:
            async with asyncio.timeout(15):
                while not condition():
                    await asyncio.sleep(0.002)

        try:
            self.run(poll())
        except TimeoutError:
            raise AssertionError(f"never became true: {what}") from None

    def answer(self, text: str, **options: Any) -> None:
        """From now on every request is answered with this text."""
        tokens = self.tokenizer.encode(text, False).tolist()
        self.plan(lambda request: Plan(tokens=tokens, **options))

    def plan(self, plan: Callable[[Any], Plan]) -> None:
        for replica in self.replicas:
            replica.plan = plan

    @property
    def api(self) -> str:
        return f"{self.address}/v1"


class Answer:
    """One HTTP response, read whole."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked to have OpenAI's shape."""
        body = json.loads(self.body)
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        assert self.headers["x-request-id"]
        return dict(body["error"])

    @property
    def events(self) -> list[Any]:
        """The stream's events as JSON, DONE as a string."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks), blocks
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def call(
    stack: Stack,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request on a connection of its own; ``body`` is JSON unless it is bytes already."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=20)
    try:
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers or {})
        return Answer(connection.getresponse())
    finally:
        connection.close()


def chat(stack: Stack, **fields: Any) -> Answer:
    """A chat request of one short message, with other fields as given."""
    return call(stack, CHAT, {"messages": [{"role": "user", "content": "hi"}], **fields})


def complete(stack: Stack, **fields: Any) -> Answer:
    return call(stack, "/v1/completions", {"prompt": "hello", **fields})


def open_request(stack: Stack, path: str, body: Any) -> socket.socket:
    """Sends a request and returns its socket, unread."""
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", stack.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock
