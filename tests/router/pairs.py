"""Routers of prefill and decode replicas, and prompts that are worth moving."""

from __future__ import annotations

from headrace.core.messages import Timing
from headrace.core.routing import Capabilities, Placement
from headrace.router.kv_traits import KvTraits
from headrace.router.router import Router
from tests.router.routing import BLOCK, add, make, route

NUM_BLOCKS = 100
LONG = tuple(range(1, NUM_BLOCKS + 1))
"""A prompt of 100 blocks and a half: 1,608 tokens, 0.8 s at the rate that is assumed to begin with."""

RATE = 2000.0
BLOCK_BYTES = 100_000
SGLANG = Capabilities(kind="sglang", remote_model="x", tokens=True, abort=True, load=True)


def kv(role: str, name: str, **fields: object) -> KvTraits:
    address = "" if role == "decode" else f"unix:/{name}"
    return KvTraits(role, address, BLOCK_BYTES, "bf16", "")._replace(**fields)


def split(prefill: int = 1, decode: int = 1) -> Router:
    """Prefill replicas p0, p1, …, decode replicas d0, d1, … of a model that is fast to move."""
    router = make()
    for i in range(prefill):
        add(router, f"p{i}", role="prefill", kv=kv("prefill", f"p{i}"))
    for i in range(decode):
        add(router, f"d{i}", role="decode", kv=kv("decode", f"d{i}"))
    return router


def place(router: Router, name: str, *numbers: int, now: float = 0.0, **fields: object) -> Placement:
    placement = router.place(route(name, *numbers, **fields), now, 1000.0 + now)
    router.check_integrity()
    assert placement is not None
    return placement


def release(router: Router, name: str, outcome="finished", *, now: float = 0.0, prefill=None) -> None:
    router.release(name, outcome, 0, 0.0, now, prefill)
    router.check_integrity()


def began(router: Router, name: str, timing: Timing | None, *, cached: int = 0, now: float = 1.0) -> None:
    router.began(name, now, cached, now, timing)
    router.check_integrity()


def streams(router: Router, count: int, *, now: float = 0.0) -> None:
    """So many requests that run on the decode replicas, their prompts long done."""
    for i in range(count):
        place(router, f"stream{i}", 9_000 + i, now=now)
        began(router, f"stream{i}", Timing(0.0, 0.01, 24), now=now)


def delivered(tokens: int = NUM_BLOCKS * BLOCK) -> Timing:
    return Timing(0.0, 0.01, 8, fill_s=0.9, num_fetched_tokens=tokens)


def status_of(router: Router, name: str):
    return next(s for s in router.status().replicas if s.member.endpoint.replica_id == name)


def words(router: Router, name: str) -> str:
    return router.why(name)[-1].split
