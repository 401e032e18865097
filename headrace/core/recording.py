"""Recorded answers: what was asked in tokens, what came out to the bit, and what computed it.

    DIR/<id>.json    {"digest": …, "record": an AnswerRecord}; the digest is over the record's bytes

A file appears whole or not at all. ``headrace replay`` computes a record again and compares.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import tempfile
from pathlib import Path

import msgspec

from headrace.core.errors import RecordError
from headrace.core.messages import Origin
from headrace.core.request import SamplingParams

FORMAT = 1
SUFFIX = ".json"
UNKNOWN, DAMAGED = "record_unknown", "record_damaged"
OTHER_MODEL, OTHER_PACK = "record_of_other_model", "record_of_other_pack"
_NAME = re.compile(r"[\w.-]{1,200}")


class RecordedSample(msgspec.Struct, frozen=True, kw_only=True):
    """``logprob_bits``: each token's log-probability, a float32's bits as a number. ``origins``: what
    computed its tokens, in order; more than one where kernels were exchanged, or replicas differ."""

    token_ids: list[int]
    logprob_bits: list[int]
    finish_reason: str
    origins: list[Origin]


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of an answer. ``sampling`` holds the seed, whoever drew it."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    samples: list[RecordedSample]


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``id`` is the answer's, ``caller_id`` the request's (``x-request-id``). ``source`` is what the model
    was loaded from, as it was given. ``num_rescues``: times that it moved to another replica."""

    format: int
    id: str
    caller_id: str
    created: str  # ISO 8601, UTC
    model: str
    source: str
    max_model_len: int
    num_rescues: int
    requests: list[RecordedRequest]

    @property
    def origins(self) -> list[Origin]:
        """All that computed a token of it, each once."""
        found: list[Origin] = []
        for request in self.requests:
            for sample in request.samples:
                found += [origin for origin in sample.origins if origin not in found]
        return found


class _File(msgspec.Struct, frozen=True):
    digest: str
    record: msgspec.Raw


def float_bits(value: float) -> int:
    """The bits of a float32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def bits_float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def encode_record(record: AnswerRecord) -> bytes:
    body = msgspec.json.encode(record)
    return msgspec.json.encode(_File(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def write_record(folder: Path, name: str, content: bytes) -> None:
    """Only its owner may read it. Raises OSError."""
    descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, folder / (name + SUFFIX))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def read_record(path: Path) -> AnswerRecord:
    """Raises RecordError where it is not whole."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        if hashlib.sha256(bytes(file.record)).hexdigest() != file.digest:
            raise RecordError(f"{path} is damaged: its digest is another", code=DAMAGED)
        record = msgspec.json.decode(file.record, type=AnswerRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is damaged: {error}", code=DAMAGED) from None
    if record.format != FORMAT:
        raise RecordError(
            f"{path} has format {record.format}, this version reads {FORMAT}",
            hint="replay it with the version that wrote it",
            code=DAMAGED,
        )
    return record


def find_record(folder: Path, wanted: str) -> AnswerRecord:
    """The record of an answer's id, or the newest of a request's id. Raises RecordError."""
    if _NAME.fullmatch(wanted) and (folder / (wanted + SUFFIX)).is_file():
        return read_record(folder / (wanted + SUFFIX))
    found: list[AnswerRecord] = []
    num_damaged = num_read = 0
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        num_read += 1
        try:
            record = read_record(path)
        except RecordError:
            num_damaged += 1
            continue
        if wanted == record.caller_id or any(wanted == one.request_id for one in record.requests):
            found.append(record)
    if not found:
        damaged = f", {num_damaged} of them damaged" if num_damaged else ""
        raise RecordError(
            f"no record of {wanted!r} in {folder} (it has {num_read} records{damaged})",
            hint="ids are an answer's `id` or its x-request-id; "
            "answers are recorded by `headrace serve --record DIR`, the oldest are dropped",
            code=UNKNOWN,
        )
    return max(found, key=lambda record: record.created)
