"""Routers with replicas that are only told about, for tests without IO."""

from __future__ import annotations

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import BlocksStored, Stats
from headrace.core.routing import Capabilities, Endpoint, ModelInfo, Outcome, Placement, Route
from headrace.router.kv_traits import NO_TRAITS, KvTraits
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
        for key in ("instance", "max_num_seqs", "num_blocks", "hardware", "block_size", "kv")
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
    kv: KvTraits = NO_TRAITS,
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
        kv=kv,
        now=now,
    )


def stats(*, blocks: int = 1000, free: int = 1000, running: int = 0) -> Stats:
    return Stats(num_blocks=blocks, num_free_blocks=free, num_running=running)


def place(router: Router, name: str, *numbers: int, now: float = 0.0, **fields: object) -> str | None:
    """Where a request goes; None: it waits."""
    placement = router.place(route(name, *numbers, **fields), now, 1000.0 + now)
    router.check_integrity()
    return None if placement is None else placement.replica_id


def release(router: Router, name: str, outcome: Outcome = "finished", *, now: float = 0.0) -> None:
    router.release(name, outcome, 0, 0.0, now)
    router.check_integrity()


def poll(router: Router, now: float = 0.0) -> dict[str, str | HeadraceError]:
    answers = router.poll(now, 1000.0 + now)
    router.check_integrity()
    return {name: a.replica_id if isinstance(a, Placement) else a for name, a in answers}


def fill(router: Router, name: str, count: int, *, only: str = "") -> list[str]:
    """Places ``count`` requests; ``only``: all must go there."""
    names = [f"{name}{i}" for i in range(count)]
    for one in names:
        placed = place(router, one)
        assert placed is not None and placed in (only or placed)
    return names
