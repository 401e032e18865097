"""A router for the supervisor: it believes what it is told, and tests say what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.errors import UnavailableError
from headrace.core.routing import Endpoint, FleetStatus, Member, ReplicaState, ReplicaStatus


class FakeRegistrar:
    """``log`` keeps every call. A replica is ready as soon as it is announced, unless ``unreachable``."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self.in_flight: dict[str, int] = {}
        self.log: list[tuple[str, Endpoint | str]] = []
        self.unreachable = False
        self.away = False
        self.asked = 0

    def set_endpoint(self, endpoint: Endpoint) -> None:
        self.log.append(("set", endpoint))
        self.endpoints[endpoint.replica_id] = endpoint

    def remove_endpoint(self, replica_id: str) -> None:
        self.log.append(("remove", replica_id))
        del self.endpoints[replica_id]

    async def status(self) -> FleetStatus:
        self.asked += 1
        if self.away:
            raise UnavailableError("the router is being restarted")
        return FleetStatus(
            policy="p",
            replicas=[
                ReplicaStatus(
                    member=Member(endpoint=endpoint, state=self._state(endpoint)),
                    num_in_flight=self.in_flight.get(endpoint.replica_id, 0),
                )
                for endpoint in self.endpoints.values()
            ],
            models=[],
            num_queued=0,
        )

    def _state(self, endpoint: Endpoint) -> ReplicaState:
        if self.unreachable:
            return "starting"
        return "draining" if endpoint.draining else "ready"


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.005)
