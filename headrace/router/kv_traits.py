"""What the router must know of a replica to let it exchange blocks with others."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.messages import Hello
from headrace.core.routing import Capabilities, Endpoint

PAIRING_KINDS = ("vllm", "sglang")
"""Servers that are not ours and hand prompts over among themselves."""


class KvTraits(NamedTuple):
    """``address``: where others fetch from it, empty: nowhere. Replicas of equal ``format`` can exchange
    blocks, those of equal ``disk`` share a disk tier, and only those of equal ``host`` reach each other's
    Unix sockets (empty: not told). ``block_bytes`` 0: not known, as for servers that are not ours. ``role``
    empty: as the endpoint says."""

    role: str = ""
    address: str = ""
    block_bytes: int = 0
    format: str = ""
    disk: str = ""
    host: str = ""

    def reaches(self, giver: KvTraits) -> bool:
        """Whether it can fetch from there: shared memory ends where the machine does."""
        is_local = giver.address.startswith("unix:")
        return not is_local or not self.host or not giver.host or self.host == giver.host


NO_TRAITS = KvTraits()


def traits_of_hello(hello: Hello) -> KvTraits:
    """Of one of our replicas."""
    return KvTraits(
        hello.role, hello.kv_address, hello.kv_block_bytes, hello.kv_format, hello.kv_disk, hello.host_id
    )


def traits_of_server(endpoint: Endpoint, capabilities: Capabilities | None) -> KvTraits:
    """Of a server that is not ours: it exchanges blocks with its like alone, by its engine's own means."""
    if capabilities is None or not capabilities.tokens or capabilities.kind not in PAIRING_KINDS:
        return KvTraits(endpoint.role)
    address = endpoint.address if endpoint.role == "prefill" else ""
    return KvTraits(endpoint.role, address, 0, f"{capabilities.kind} {capabilities.remote_model}", "")
