"""What a caller is told whose request finds no replica."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import HeadraceError, OverloadedError, UnavailableError
from headrace.core.routing import Route
from headrace.router.registry import Replica

MAX_RETRY_AFTER_S = 60


def no_replica(route: Route, replicas: Sequence[Replica]) -> UnavailableError:
    """None of the model's ``replicas`` can take such a request, up or not."""
    if route.text_only and replicas:
        return UnavailableError(
            f"no replica of {route.model!r} takes this request: it can only be sent on as text",
            hint="add a server with an OpenAI-compatible API by --worker-urls",
        )
    if not replicas:
        return scaled_to_zero(route.model)
    return UnavailableError(f"no replica of {route.model!r} can answer", hint="see `headrace ps`")


def scaled_to_zero(model: str) -> UnavailableError:
    """There is no replica of a model that can have some."""
    return UnavailableError(
        f"{model} has no replica: it is scaled to 0", hint=f"Start one: headrace scale 1 --model {model}"
    )


def queue_full(route: Route, replicas: Sequence[Replica], num_waiting: int) -> OverloadedError:
    """It may not even wait."""
    return OverloadedError(
        f"no replica of {route.model!r} has room and {num_waiting} requests wait already",
        hint="retry later, add replicas, or raise --max-queue",
        retry_after=_retry_after(replicas, num_waiting),
    )


def waited_too_long(
    route: Route, replicas: Sequence[Replica], num_waiting: int, *, waited_s: float, late: bool
) -> HeadraceError:
    """``late``: its deadline has passed; otherwise the longest wait."""
    until = "until its deadline" if late else f"{waited_s:.0f} s"
    if not any(replica.open for replica in replicas):
        return UnavailableError(
            f"waited {until}, and no replica of {route.model!r} became ready", hint="see `headrace ps`"
        )
    return OverloadedError(
        f"waited {until}, and no replica of {route.model!r} had room",
        hint="retry later, add replicas, or raise --queue-timeout-s",
        retry_after=_retry_after(replicas, num_waiting),
    )


def _retry_after(replicas: Sequence[Replica], num_waiting: int) -> int:
    """Seconds until those who wait will have been placed, from how long requests take."""
    per_second = sum(r.max_in_flight / max(r.rates.decode_s + r.ttft_s, 0.01) for r in replicas if r.open)
    seconds = num_waiting / per_second if per_second else MAX_RETRY_AFTER_S
    return max(1, min(MAX_RETRY_AFTER_S, round(seconds)))
