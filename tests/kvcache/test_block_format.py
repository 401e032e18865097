"""A block's header and checks find every damage that they are there for."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.kvcache.block_format import (
    HEADER_BYTES,
    BlockHeader,
    DamagedBlockError,
    check_payload,
    checksum,
    format_digest,
)

PAYLOAD = bytes(range(256)) * 4
HEADER = BlockHeader(b"i" * 32, b"p" * 32, b"r" * 32, format_digest("f"), len(PAYLOAD), checksum(PAYLOAD))


def test_header_round_trip() -> None:
    data = HEADER.encode()
    assert len(data) == HEADER_BYTES
    assert BlockHeader.decode(data) == HEADER
    HEADER.check(dataclasses.replace(HEADER, checksum=0))


def test_any_changed_byte_of_a_header_is_found() -> None:
    data = HEADER.encode()
    for position in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[position] ^= bit
            with pytest.raises(DamagedBlockError):
                BlockHeader.decode(damaged)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_short_header_is_truncated(length: int) -> None:
    with pytest.raises(DamagedBlockError, match="truncated"):
        BlockHeader.decode(HEADER.encode()[:length])


@pytest.mark.parametrize(
    "change",
    [
        {"block_id": b"j" * 32},
        {"parent": b"q" * 32},
        {"root": b"s" * 32},
        {"format_digest": format_digest("g")},
        {"length": 7},
    ],
)
def test_a_sound_block_of_somebody_else_is_not_taken(change: dict[str, object]) -> None:
    other = BlockHeader.decode(dataclasses.replace(HEADER, **change).encode())  # type: ignore[arg-type]
    with pytest.raises(DamagedBlockError):
        other.check(HEADER)


def test_payload_is_checked_for_length_and_content() -> None:
    check_payload(PAYLOAD, len(PAYLOAD), checksum(PAYLOAD))
    with pytest.raises(DamagedBlockError, match="truncated"):
        check_payload(PAYLOAD[:-1], len(PAYLOAD), checksum(PAYLOAD))
    altered = bytearray(PAYLOAD)
    altered[500] ^= 4
    with pytest.raises(DamagedBlockError, match="altered"):
        check_payload(altered, len(PAYLOAD), checksum(PAYLOAD))
