"""Who asks and in which class: what headers and body say beside the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.schema import Sampling

MAX_SESSION_CHARS = 128
_TIERS = {"auto": "standard", "default": "standard", "flex": "flex", "priority": "priority"}
_REPORTED = {"standard": b"default", "flex": b"flex", "priority": b"priority"}
_YES = (b"1", b"true")


class Caller(NamedTuple):
    """``session`` keeps a conversation's requests together, ``receipt``: the answer carries one.

    ``reported_tier`` is OpenAI's word for ``tier``, empty where the caller named none.
    """

    tier: str
    reported_tier: bytes
    session: str | None
    receipt: bool


def caller_of(exchange: Exchange, fields: Sampling) -> Caller:
    """Reads it from ``x-session-id``, ``prompt_cache_key`` or ``user``, and ``x-headrace-receipt``."""
    session: str | None = None
    for name, value in exchange.headers:
        if name == b"x-session-id":
            session = value.decode("latin-1")
    receipt = wants_receipt(exchange)
    session = session or fields.prompt_cache_key or fields.user or None
    if session is not None:
        session = session[:MAX_SESSION_CHARS]
    if fields.service_tier is None:
        return Caller("standard", b"", session, receipt)
    tier = _TIERS[fields.service_tier]
    return Caller(tier, _REPORTED[tier], session, receipt)


def wants_receipt(exchange: Exchange) -> bool:
    """Whether ``x-headrace-receipt`` asks for one."""
    return any(name == b"x-headrace-receipt" and value.lower() in _YES for name, value in exchange.headers)
