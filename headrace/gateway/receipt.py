"""Where an answer's time went: parts that add up to the whole, in milliseconds.

    arrival ─ text ─ submitted ─ route ─ placed ─ engine_queue ─ fill ─ prefill ─ first token ─ decode ─ last
                                                └──────────────── network ───────────────┘           token

``fill`` is the wait for blocks from a prefill replica or from disk, in place of computing them.
``network`` is what the other parts leave of the total: sockets, and whatever no part claims. A request
that was rescued before its first token has the lost attempts in ``route``; a pause in mid-stream is part
of ``decode``. With several prompts it tells of the one that ended last. Of the prompt's tokens, those
``cached`` (``from_disk`` counts among them), ``fetched`` from a prefill replica and ``computed`` are all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.gateway.generation import Generation
    from headrace.router.worker import TextPlacement

PARTS = ("text", "route", "engine_queue", "fill", "prefill", "decode", "network")
_INSIDE = ("engine_queue", "fill", "prefill")  # by the replica's clock, between placement and first token


def receipt_of(generation: Generation) -> dict[str, Any]:
    """The receipt of a generation whose last token has arrived."""
    last = max(generation.samples, key=lambda sample: sample.last_at)
    request_id = last.request.request_id
    flight, first = generation.flights[request_id], generation.firsts[request_id]
    placement, timing = flight.placement, flight.timing
    prompt, cached = generation.num_prompt_tokens, generation.num_cached_tokens
    flights = list(generation.flights.values())
    timings = [each.timing for each in flights if each.timing is not None]
    fetched = sum([each.num_fetched_tokens for each in timings])
    parts = waterfall(
        generation.arrival,
        text_s=generation.text_s,
        route_s=first.placed_at - generation.submitted_at,
        before_s=first.at - first.placed_at,
        queue_s=timing.queue_s if timing is not None else 0.0,
        fill_s=timing.fill_s if timing is not None else 0.0,
        prefill_s=timing.prefill_s if timing is not None else 0.0,
        decode_s=last.last_at - first.at,
        end=last.last_at,
    )
    return {
        "request_id": generation.caller_id,
        "replica": placement.replica_id if placement is not None else None,
        "prefill_replica": (first.placement.prefill_replica or None) if first.placement is not None else None,
        "attempts": max([each.attempt for each in flights]) + 1,
        "rescues": sum([each.num_rescues for each in flights]),
        "tokens": {
            "prompt": prompt,
            "cached": cached,
            "from_disk": sum([each.num_disk_tokens for each in timings]),
            "fetched": fetched,
            "computed": prompt - cached - fetched,
            "output": sum([sample.num_tokens for sample in generation.samples]),
        },
        "ttft_ms": {
            "predicted": None if first.placement is None else round(1e3 * first.placement.ttft_s, 3),
            "actual": round(1e3 * (first.at - first.placed_at), 3),
        },
        "waterfall_ms": parts,
    }


def text_receipt(
    request_id: str, placed: TextPlacement, *, arrival: float, first_at: float, end: float
) -> dict[str, Any]:
    """The receipt of a body that passed through to a server of others: what is known of its way.

    ``first_byte`` is what network and server took until the answer began, ``stream`` from there to its end.
    """
    placement = placed.placement
    marks = {"text": placed.submitted_at, "route": placed.placed_at, "first_byte": first_at, "stream": end}
    total, last, parts = _micros(end - arrival), 0, {}
    for name, at in marks.items():
        until = total if name == "stream" else min(max(_micros(at - arrival), last), total)
        parts[name], last = until - last, until
    return {
        "request_id": request_id,
        "replica": placement.replica_id,
        "attempts": placed.attempt + 1,
        "ttft_ms": {
            "predicted": round(1e3 * placement.ttft_s, 3),
            "actual": round(1e3 * (first_at - placed.placed_at), 3),
        },
        "waterfall_ms": {name: value / 1000 for name, value in (*parts.items(), ("total", total))},
    }


def waterfall(
    arrival: float,
    *,
    text_s: float,
    route_s: float,
    before_s: float,
    queue_s: float,
    fill_s: float,
    prefill_s: float,
    decode_s: float,
    end: float,
) -> dict[str, float]:
    """Seconds to milliseconds of whole microseconds, none below zero, each within what is left for it."""
    total = left = _micros(end - arrival)
    inside = _micros(before_s)  # between placement and first token
    parts = dict.fromkeys(PARTS, 0)
    for name, seconds in (
        ("text", text_s),
        ("route", route_s),
        ("decode", decode_s),
        ("engine_queue", queue_s),
        ("fill", fill_s),
        ("prefill", prefill_s),
    ):
        room = left
        if name in _INSIDE:
            room = min(left, inside)
        parts[name] = min(_micros(seconds), room)
        left -= parts[name]
        if name in _INSIDE:
            inside -= parts[name]
    parts["network"] = left
    return {name: value / 1000 for name, value in (*parts.items(), ("total", total))}


def _micros(seconds: float) -> int:
    return max(0, int(1e6 * seconds))
