"""What passes between the two sides of a connector.

    receiver ──► sender    Fetch, Credit, Cancel; Freed (shared memory)
    sender ──► receiver    Ring (shared memory, first), Refused, Block …, Computed, Done; Alive

A job ends in one Refused or Done, or with the connection.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 1


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """The full blocks of ``tokens`` (packed uint32) from number ``first`` on.

    Up to ``window`` blocks may be sent; Credit allows more. ``kv_format`` and ``root`` must be the sender's.
    """

    job_id: str
    protocol: int
    root: bytes
    kv_format: str
    tokens: bytes
    first: int
    window: int


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """So many more blocks have been used by the receiver and may be sent."""

    job_id: str
    num_blocks: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The job is not wanted any more; nothing answers it."""

    job_id: str


class Freed(msgspec.Struct, frozen=True, tag="freed"):
    """So many more slots of the ring, in order, have been copied out."""

    num_slots: int


class Ring(msgspec.Struct, frozen=True, tag="ring"):
    """Comes with the file descriptor of the memory in which blocks will lie."""

    num_slots: int
    slot_bytes: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The job cannot be done here; the reason in words."""

    job_id: str
    reason: str


class Block(msgspec.Struct, frozen=True, tag="block", omit_defaults=True):
    """One block: in ``slot`` of the ring, or in the ``length`` bytes that follow. CRC-32 of its bytes."""

    job_id: str
    index: int
    block_id: bytes
    length: int
    checksum: int
    slot: int = 0


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """The sender computes no more for the job."""

    job_id: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Nothing follows for the job. Empty: all its blocks were sent."""

    job_id: str
    reason: str = ""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Told every second while a job is open, so that silence means a lost peer."""


ToSender = Fetch | Credit | Cancel | Freed
ToReceiver = Ring | Refused | Block | Computed | Done | Alive
