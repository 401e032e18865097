"""The policies by name, one file each."""

from __future__ import annotations

from headrace.router.policies.base import Policy
from headrace.router.policies.least_load import LeastLoad
from headrace.router.policies.power_of_two import PowerOfTwo
from headrace.router.policies.predicted_ttft import PredictedTtft
from headrace.router.policies.prefix_only import PrefixOnly
from headrace.router.policies.random_choice import RandomChoice
from headrace.router.policies.round_robin import RoundRobin


def make_policy(name: str, seed: int = 0) -> Policy:
    """The policy of that name (``RouterConfig.routing_policy``); ``seed`` is for those that draw."""
    policies: dict[str, Policy] = {
        "predicted_ttft": PredictedTtft(),
        "round_robin": RoundRobin(),
        "random": RandomChoice(seed),
        "least_load": LeastLoad(),
        "power_of_two": PowerOfTwo(seed),
        "prefix_only": PrefixOnly(),
    }
    return policies[name]
