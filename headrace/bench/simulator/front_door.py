"""Recorded requests as callers of the real gateway: streamed completions over HTTP on a Unix socket.

A Unix socket, because what is written to it can be read at once, without the kernel's network stack in
between, which works in real time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from headrace.bench.load import send
from headrace.bench.metrics import RequestTrace
from headrace.bench.simulator.replica import PacedModel
from headrace.bench.traces import Arrival
from headrace.core.errors import EngineError
from headrace.core.knobs import GatewayConfig
from headrace.gateway.server import serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.router.dispatcher import Dispatcher
from headrace.text.tokenizer import Tokenizer

URL = "http://localhost/v1/completions"
PATIENCE_S = 1e9


async def post_all(
    arrivals: Sequence[Arrival],
    model: PacedModel,
    dispatcher: Dispatcher,
    folder: Path,
    log: logging.Logger,
) -> list[RequestTrace]:
    """Posts each request at its time, from now on; returns when all have ended. EngineError if one fails."""
    loop = asyncio.get_running_loop()
    config = GatewayConfig(max_concurrent_requests=len(arrivals))
    served = ServedModel(model.name, [model.name], _tokenizer(folder, model), dispatcher)
    gateway = Gateway(config, models=[served], dispatcher=dispatcher, log=log)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(folder / "gateway.sock"))
    sock.setblocking(False)
    stop = asyncio.Event()
    server = asyncio.create_task(
        serve(gateway, config, log=log, stop=stop, socket=sock, handle_signals=False)
    )
    began = loop.time()

    async def one(arrival: Arrival) -> RequestTrace:
        await asyncio.sleep(began + arrival.at - loop.time())
        trace = await send(session, URL, _body(arrival, model), timeout_s=PATIENCE_S, clock=loop.time)
        if trace.error is not None:
            raise EngineError(f"a request of the replay failed: {trace.error}")
        return trace

    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(folder / "gateway.sock"), limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_read=None, sock_connect=None),
            read_bufsize=1 << 20,
        ) as session:
            return list(await asyncio.gather(*map(one, arrivals)))
    finally:
        stop.set()
        await server


def _body(arrival: Arrival, model: PacedModel) -> bytes:
    tokens = memoryview(arrival.request.prompt(model.vocab_size)).cast("I").tolist()
    return json.dumps(
        {
            "model": model.name,
            "prompt": tokens,
            "max_tokens": arrival.request.output_length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        separators=(",", ":"),
    ).encode()


def _tokenizer(folder: Path, model: PacedModel) -> Tokenizer:
    """One short word for each token id."""
    words = {f"w{number};": number for number in range(model.vocab_size)}
    backend = Backend(models.WordLevel(words, unk_token="w0;"))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)
