"""Our gateway in front of mock replicas of our own wire: ``token_gateway PORT MODEL SOCKET...``.

Everything is wired as ``headrace serve`` does, except that the replicas are not its children.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from pathlib import Path

from headrace.core.identity import root_identity
from headrace.core.knobs import GatewayConfig, LogConfig, RouterConfig
from headrace.core.logs import set_up_logging
from headrace.core.messages import Hello
from headrace.core.process import spare_the_loaded
from headrace.core.routing import Endpoint
from headrace.core.wire import encode_frame
from headrace.gateway.server import serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.models.packages import DEFAULT_MODEL
from headrace.models.resolve import resolve_model
from headrace.router.dispatcher import Dispatcher
from headrace.router.placer import LocalPlacer
from headrace.text.tokenizer import Tokenizer

BLOCK_SIZE = 32


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model(DEFAULT_MODEL).folder)


def first_token_id(count: int) -> int:
    """The first of ``count`` consecutive ids that are plain ASCII text."""
    tokenizer = _tokenizer()
    for first in range(1000, tokenizer.vocab_size - count):
        if all(tokenizer.token_bytes(token).isascii() for token in range(first, first + count)):
            return first
    raise AssertionError("no such run of tokens")


def write_hello(path: Path, replica_id: str, model: str) -> None:
    """The framed greeting of one mock replica."""
    tokenizer = _tokenizer()
    hello = Hello(
        replica_id=replica_id,
        pid=0,
        model=model,
        model_revision="mock",
        role="unified",
        device="cpu",
        dtype="bfloat16",
        vocab_size=tokenizer.vocab_size,
        max_model_len=8192,
        max_num_seqs=64,
        block_size=BLOCK_SIZE,
        num_blocks=100_000,
        root_identity=root_identity(
            model_revision="mock", kv_dtype="bfloat16", kv_layout="mock", block_size=BLOCK_SIZE
        ),
        eos_token_ids=list(tokenizer.eos_token_ids),
        load_seconds=0.0,
        weights_bytes=0,
        kv_bytes=0,
        notes=[],
        instance=replica_id,
    )
    path.write_bytes(encode_frame(hello))


async def _serve(port: int, model: str, sockets: list[str]) -> None:
    log = logging.getLogger("headrace")
    config = GatewayConfig(port=port)
    placer = LocalPlacer(RouterConfig(), log=log)
    placer.start()
    dispatcher = Dispatcher(placer, RouterConfig(), log=log)
    dispatcher.start()
    for index, path in enumerate(sockets):
        placer.set_endpoint(Endpoint(replica_id=f"mock-{index}", model=model, address=path, kind="headrace"))
    tokenizer = _tokenizer()
    gateway = Gateway(
        config, models=[ServedModel(model, [model], tokenizer, dispatcher)], dispatcher=dispatcher, log=log
    )
    spare_the_loaded()
    try:
        await serve(gateway, config, log=log)
    finally:
        await dispatcher.close()
        await placer.close()
        tokenizer.close()


if __name__ == "__main__":
    import uvloop

    set_up_logging(LogConfig())
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
