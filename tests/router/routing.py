"""Routers with replicas that are only told about, for tests without IO."""

from __future__ import annotations

import msgspec

from headrace.core.knobs import RouterConfig
from headrace.core.messages import BlocksStored, Stats
from headrace.core.routing import Capabilities, Endpoint, ModelInfo, Route
from headrace.router.router import Router

BLOCK = 16
OURS = Capabilities(kind="headrace", tokens=True, exact_rescue=True, cache_events=True, abort=True, load=True)
VLLM = Capabilities(kind="vllm", tokens=True, abort=True, load=True)
TEXT = Capabilities(kind="openai")


def block(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(24)


def chain(*numbers: int) -> bytes:
    return b"".join(map(block, numbers))


def stored(*numbers: int) -> BlocksStored:
    return BlocksStored([block(number) for number in numbers], bytes(32))


def route(name: str, *numbers: int, tokens: int = 0, **fields: object) -> Route:
    """A request of the given blocks and, unless ``tokens`` says more, half a block behind them."""
    base = Route(
        request_id=name,
        caller_id=f"caller-{name}",
        model="m",
        num_prompt_tokens=tokens or BLOCK * len(numbers) + BLOCK // 2,
        block_ids=chain(*numbers),
    )
    return msgspec.structs.replace(base, **fields)


def make(count: int = 0, *, capabilities: Capabilities = OURS, seed: int = 0, **config: object) -> Router:
    """A router with ``count`` replicas r0, r1, … that are up."""
    router = Router(msgspec.convert(config, RouterConfig), seed=seed)
    for i in range(count):
        add(router, f"r{i}", capabilities)
    return router


def add(
    router: Router, name: str, capabilities: Capabilities = OURS, *, now: float = 0.0, **fields: object
) -> None:
    """An endpoint that is up. ``fields`` are the Endpoint's, and ``up``'s arguments."""
    told = {
        key: fields.pop(key)
        for key in ("instance", "max_num_seqs", "num_blocks", "hardware", "block_size")
        if key in fields
    }
    base = Endpoint(replica_id=name, model="m", address=f"/{name}", kind=capabilities.kind)
    router.set_endpoint(msgspec.structs.replace(base, **fields), now)
    up(router, name, capabilities, now=now, **told)


def up(
    router: Router,
    name: str,
    capabilities: Capabilities = OURS,
    *,
    instance: str = "one",
    max_num_seqs: int = 8,
    num_blocks: int = 1000,
    block_size: int = BLOCK,
    hardware: str = "cpu",
    now: float = 0.0,
) -> None:
    info = ModelInfo(
        model="m",
        max_model_len=100_000,
        block_size=BLOCK,
        root_identity=bytes(32),
        tokens=capabilities.tokens,
    )
    router.up(
        name,
        instance=instance,
        capabilities=capabilities,
        model=info,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        hardware=hardware,
        now=now,
    )


def stats(*, blocks: int = 1000, free: int = 1000, running: int = 0) -> Stats:
    return Stats(num_blocks=blocks, num_free_blocks=free, num_running=running)
