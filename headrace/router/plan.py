"""How a replica would come by a prompt: what it has, what it is brought, and from where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.core.routing import Route
from headrace.router.policies.base import RouteView

if TYPE_CHECKING:
    from headrace.router.registry import Replica


class Giver(NamedTuple):
    """One that could compute the prompt. ``ready_s`` from now it will have; ``harm_s``: its streams' loss."""

    replica: Replica
    depth: int
    num_cached_tokens: int
    ready_s: float
    harm_s: float


class Plan(NamedTuple):
    """How one candidate would come by the prompt. It has ``num_cached_tokens``, of them ``num_disk_tokens``
    on disk; ``giver`` computes ``num_fetched_tokens``; after ``fill_s`` all of these are in its memory.
    ``asked`` is the giver that was considered, ``saved_s`` what taking it saves (see ``router.pairs``)."""

    num_cached_tokens: int
    num_disk_tokens: int = 0
    num_fetched_tokens: int = 0
    fill_s: float = 0.0
    giver: Giver | None = None
    asked: Giver | None = None
    saved_s: float = 0.0


def tokens_per_block(route: Route, replica: Replica, num_blocks: int) -> int:
    """Tokens of the request to each of its ``num_blocks`` identities."""
    if route.text_only:
        return route.num_prompt_tokens // num_blocks if num_blocks else 0
    return replica.model.block_size if replica.model is not None else replica.block_size


def view_of(route: Route, plans: Sequence[Plan], num_users: float, home: str | None) -> RouteView:
    """The request as a policy sees it."""
    cached = [plan.num_cached_tokens for plan in plans]
    view = RouteView(route.num_prompt_tokens, route.num_samples, cached, num_users, home)
    if any(plan.fill_s for plan in plans):
        fetched = [plan.num_fetched_tokens for plan in plans]
        view = view._replace(fetched=fetched, fill_s=[plan.fill_s for plan in plans])
    return view
