"""Frames on our own sockets: a 4-byte little-endian length, then one msgpack message.

A peer's death is an EOF and a full socket is backpressure; nothing here retries or buffers without bound.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from headrace.core.messages import FromReplica, ToReplica
from headrace.core.routing import FromRouter, ToRouter

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """The peer sent something that is no message of ours; the connection is beyond repair."""


def encode_frame(message: Any) -> bytes:
    """One message, ready to be written."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    length = len(buffer) - _LENGTH.size
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"message of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(buffer, 0, length)
    return bytes(buffer)


Message = TypeVar("Message")


class FrameDecoder(Generic[Message]):
    """Turns received bytes into messages of one type; raises FrameError on anything else."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by ``data``, in order."""
        buffer = self._buffer
        buffer += data
        messages = []
        offset = 0
        while len(buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, offset)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
            end = offset + _LENGTH.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view, view[offset + _LENGTH.size : end] as body:
                try:
                    messages.append(self._decoder.decode(body))
                except msgspec.DecodeError as error:
                    raise FrameError(f"undecodable message: {error}") from error
            offset = end
        del buffer[:offset]
        return messages


def replica_decoder() -> FrameDecoder[ToReplica]:
    """Decodes what a replica receives."""
    return FrameDecoder(ToReplica)


def gateway_decoder() -> FrameDecoder[FromReplica]:
    """Decodes what a replica sends."""
    return FrameDecoder(FromReplica)


def router_decoder() -> FrameDecoder[ToRouter]:
    """Decodes what the router receives from gateways and the supervisor."""
    return FrameDecoder(ToRouter)


def peer_decoder() -> FrameDecoder[FromRouter]:
    """Decodes what the router sends to gateways and the supervisor."""
    return FrameDecoder(FromRouter)
