"""Bodies for servers that take text: forwarded as they come, answered as they answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway
    from headrace.router.external.text_worker import TextLease, TextWorker


async def pass_through(gateway: Gateway, served: object, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Answers a chat or completions request of a model whose replicas take text only."""
    raise AssertionError("under construction")


def forward_overflow(
    gateway: Gateway,
    exchange: Exchange,
    body: bytes,
    worker: TextWorker,
    lease: TextLease,
    on_done: Callable[[], None],
) -> Callable[[], None]:
    """Answers a token request that was placed on a server that takes text (``Sink.on_text_worker``).

    ``body`` is the caller's. Calls ``on_done`` once the answer is complete, broken or the caller has gone
    (not after ``lease.failed``, when the flight decides). Returns what aborts it.
    """
    raise AssertionError("under construction")
