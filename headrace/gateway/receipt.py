"""Where an answer's time went: parts that add up to the whole, in milliseconds.

    arrival ─ text ─ submitted ─ route ─ placed ─ engine_queue ─ prefill ─ first token ─ decode ─ last token
                                                └──────────── network ────────────┘

``network`` is what the other parts leave of the total: sockets, and whatever no part claims. A request
that was rescued before its first token has the lost attempts in ``route``; a pause in mid-stream is part
of ``decode``. With several prompts it tells of the one that ended last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.gateway.generation import Generation

PARTS = ("text", "route", "engine_queue", "prefill", "decode", "network")


def receipt_of(generation: Generation) -> dict[str, Any]:
    """The receipt of a generation whose last token has arrived."""
    last = max(generation.samples, key=lambda sample: sample.last_at)
    request_id = last.request.request_id
    flight, first = generation.flights[request_id], generation.firsts[request_id]
    placement, timing = flight.placement, flight.timing
    prompt, cached = generation.num_prompt_tokens, generation.num_cached_tokens
    flights = list(generation.flights.values())
    parts = waterfall(
        generation.arrival,
        text_s=generation.text_s,
        route_s=first.placed_at - generation.submitted_at,
        before_s=first.at - first.placed_at,
        queue_s=timing.queue_s if timing is not None else 0.0,
        prefill_s=timing.prefill_s if timing is not None else 0.0,
        decode_s=last.last_at - first.at,
        end=last.last_at,
    )
    return {
        "request_id": generation.caller_id,
        "replica": placement.replica_id if placement is not None else None,
        "attempts": max([each.attempt for each in flights]) + 1,
        "rescues": sum([each.num_rescues for each in flights]),
        "tokens": {
            "prompt": prompt,
            "cached": cached,
            "computed": prompt - cached,
            "output": sum([sample.num_tokens for sample in generation.samples]),
        },
        "ttft_ms": {
            "predicted": None if first.placement is None else round(1e3 * first.placement.ttft_s, 3),
            "actual": round(1e3 * (first.at - first.placed_at), 3),
        },
        "waterfall_ms": parts,
    }


def waterfall(
    arrival: float,
    *,
    text_s: float,
    route_s: float,
    before_s: float,
    queue_s: float,
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
        ("prefill", prefill_s),
    ):
        room = left
        if name in ("engine_queue", "prefill"):  # another machine's clock
            room = min(left, inside)
        parts[name] = min(_micros(seconds), room)
        left -= parts[name]
        if name in ("engine_queue", "prefill"):
            inside -= parts[name]
    parts["network"] = left
    return {name: value / 1000 for name, value in (*parts.items(), ("total", total))}


def _micros(seconds: float) -> int:
    return max(0, int(1e6 * seconds))
