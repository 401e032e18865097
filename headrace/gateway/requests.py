"""What chats and completions do between text and generation."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from headrace.core.request import Request, SamplingParams
from headrace.gateway.fields import header_value

if TYPE_CHECKING:
    from headrace.core.routing import ModelInfo
    from headrace.gateway.caller import Caller
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway, ServedModel


def engine_request(
    request_id: str,
    served: ServedModel,
    info: ModelInfo,
    token_ids: array[int],
    block_ids: bytes,
    sampling: SamplingParams,
    caller: Caller,
    *,
    record: bool = False,
) -> Request:
    """``block_ids`` were computed from ``info``; they are dropped if the model has changed since."""
    return Request(
        request_id=request_id,
        prompt=token_ids.tobytes(),
        sampling=sampling,
        block_ids=block_ids if served.has_root(info.root_identity) else b"",
        model=served.model,
        tier=caller.tier,
        session=caller.session,
        record=record,
    )


def note(gateway: Gateway, exchange: Exchange, ignored: list[str], text_s: float) -> None:
    """Headers about ignored fields and the time of the text work; the former are counted."""
    exchange.extra_headers.append((b"server-timing", b"text;dur=%.2f" % (1000 * text_s)))
    if ignored:
        gateway.metrics.ignore(ignored)
        exchange.extra_headers.append((b"x-headrace-ignored-fields", header_value(ignored)))
