"""Recorded answers: what was asked in tokens, what came out to the bit, and what computed it.

    DIR/<id>.json    {"digest": …, "record": an AnswerRecord}; the digest is over the record's bytes

A file appears whole or not at all. A folder may hold other files, which are never removed.
``headrace replay`` computes a record again and compares.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import struct
import tempfile
from pathlib import Path

import msgspec

from headrace.core.errors import InvalidRequestError, RecordError
from headrace.core.files import MEGABYTE, open_regular, read_regular
from headrace.core.messages import Origin
from headrace.core.request import SamplingParams

FORMAT = 1
SUFFIX = ".json"
UNKNOWN, DAMAGED = "record_unknown", "record_damaged"
OTHER_MODEL, OTHER_PACK = "record_of_other_model", "record_of_other_pack"
MAX_BYTES = 1024 * MEGABYTE
"""The largest record that is read."""

_NAME = re.compile(r"[\w.-]{1,200}")
_OWN_NAME = re.compile(r"(chat)?cmpl-[0-9a-f]{32}\.json")
_OWN_BEGIN = re.compile(rb'\{"digest":"[0-9a-f]{64}","record":\{"format":')
_BEGIN_BYTES = 128
_WORD = 1 << 32


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
    """The bits of a float32; what is too large for one is infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    bits: int = struct.unpack("<I", packed)[0]
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


def is_record(path: Path) -> bool:
    """Whether a recorder wrote this file, by its name and its first bytes."""
    if _OWN_NAME.fullmatch(path.name) is None:
        return False
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            return _OWN_BEGIN.match(file.read(_BEGIN_BYTES)) is not None
    except OSError:
        return False


def read_record(path: Path) -> AnswerRecord:
    """Raises RecordError where it is not whole, or holds what no answer can have."""
    try:
        file = msgspec.json.decode(read_regular(path, MAX_BYTES), type=_File)
        if hashlib.sha256(bytes(file.record)).hexdigest() != file.digest:
            raise RecordError(f"{path} is damaged: its digest is another", code=DAMAGED)
        record = msgspec.json.decode(file.record, type=AnswerRecord)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}", code=DAMAGED) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error}", code=DAMAGED) from None
    if record.format != FORMAT:
        raise RecordError(
            f"{path} has format {record.format}, this version reads {FORMAT}",
            hint="replay it with the version that wrote it",
            code=DAMAGED,
        )
    wrong = _wrong(record)
    if wrong is not None:
        raise RecordError(f"{path} is damaged: {wrong}", code=DAMAGED)
    return record


def _wrong(record: AnswerRecord) -> str | None:
    """What is out of range in a record of the right form: a digest does not say who made it."""
    for name, least in (("max_model_len", 0), ("num_rescues", 0)):
        if getattr(record, name) < least:
            return f"{name} must be at least {least}, is {getattr(record, name)}"
    for request in record.requests:
        try:
            request.sampling.validate()
        except InvalidRequestError as error:
            return error.message
        if not request.prompt:
            return f"the prompt of {request.request_id!r} is empty"
        if len(request.samples) != request.sampling.n:
            return f"n is {request.sampling.n}, samples are {len(request.samples)}"
        numbers = {"token of the prompt": request.prompt}
        for index, sample in enumerate(request.samples):
            if len(sample.token_ids) != len(sample.logprob_bits):
                return (
                    f"sample {index} has {len(sample.token_ids)} tokens and "
                    f"{len(sample.logprob_bits)} log-probabilities"
                )
            numbers[f"token of sample {index}"] = sample.token_ids
            numbers[f"log-probability of sample {index}"] = sample.logprob_bits
        for what, values in numbers.items():
            if values and not (min(values) >= 0 and max(values) < _WORD):
                outside = next(value for value in values if not 0 <= value < _WORD)
                return f"a {what} is {outside}, which is no number of 32 bits"
    return None


def find_record(folder: Path, wanted: str) -> AnswerRecord:
    """The record of an answer's id, or the newest of a request's id. Raises RecordError."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError as error:
        raise RecordError(
            f"the folder of records {folder} cannot be read: {error.strerror}",
            hint="--record DIR, as `headrace serve` was given",
            code=UNKNOWN,
        ) from None
    if _NAME.fullmatch(wanted) and wanted + SUFFIX in names:
        return read_record(folder / (wanted + SUFFIX))
    found: list[AnswerRecord] = []
    unread: list[str] = []
    for name in names:
        try:
            record = read_record(folder / name)
        except RecordError:
            unread.append(name)
            continue
        if wanted == record.caller_id or any(wanted == one.request_id for one in record.requests):
            found.append(record)
    if not found:
        beside = f", and {len(unread)} files that are none or damaged, {unread[0]} first" if unread else ""
        raise RecordError(
            f"no record of {wanted!r} in {folder} (it has {len(names) - len(unread)} records{beside})",
            hint="ids are an answer's `id` or its x-request-id; "
            "answers are recorded by `headrace serve --record DIR`, the oldest are dropped",
            code=UNKNOWN,
        )
    return max(found, key=lambda record: record.created)
