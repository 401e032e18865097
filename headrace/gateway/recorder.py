"""Writes down finished answers, for those who replay them.

A Recording listens to one Generation: the gateway alone knows what the caller sees as the answer's id, what
was drawn for it, and every token of it across replicas. A Recorder writes what came of it, in a thread beside
the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.core.errors import UsageError
from headrace.core.messages import Origin, Output
from headrace.core.recording import (
    FORMAT,
    AnswerRecord,
    RecordedRequest,
    RecordedSample,
    encode_record,
    float_bits,
    is_record,
    write_record,
)

if TYPE_CHECKING:
    from headrace.gateway.generation import Generation, Sample
    from headrace.gateway.state import ServedModel

MEGABYTE = 1024 * 1024
QUIET_S = 60.0
"""For so long nothing more is said of what was said, though it may have gone well meanwhile."""
PROBE_BYTES = 4096
MAX_WAITING = 256
"""Records on their way to the disk; more are dropped, as nobody waits for a slow one."""


class _Noted:
    """What one sample's outputs brought beside text."""

    __slots__ = ("bits", "origins", "token_ids", "whole")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.bits: list[int] = []
        self.origins: list[Origin] = []
        self.whole = True


class Recording:
    """One answer as it comes; ``take`` is called with all that its flights bring, before anybody else."""

    def __init__(self, answer_id: str, served: ServedModel) -> None:
        self._answer_id = answer_id
        self._served = served
        self._noted: dict[tuple[str, int], _Noted] = {}

    def take(self, outputs: Sequence[Output], samples: dict[str, list[Sample]]) -> list[Output]:
        """Notes what is new; gives the outputs as the caller asked for them."""
        shown = []
        for output in outputs:
            sample = samples[output.request_id][output.sample_index]
            if sample.finish_reason is None:
                self._note(output)
            if output.logprobs is not None and sample.request.sampling.logprobs is None:
                output = msgspec.structs.replace(output, logprobs=None)
            shown.append(output)
        return shown

    def record(self, generation: Generation) -> AnswerRecord | None:
        """What is to be kept; None where a server of others computed a part of it, of which too little is
        known."""
        if any(not noted.whole or not noted.origins for noted in self._noted.values()):
            return None
        requests = []
        for request in generation.requests:
            samples = []
            for index, sample in enumerate(generation.samples_of(request.request_id)):
                noted = self._noted.get((request.request_id, index))
                if noted is None:
                    return None
                samples.append(
                    RecordedSample(
                        token_ids=noted.token_ids,
                        logprob_bits=noted.bits,
                        finish_reason=sample.finish_reason or "",
                        origins=noted.origins,
                    )
                )
            requests.append(
                RecordedRequest(
                    request_id=request.request_id,
                    prompt=request.token_ids().tolist(),
                    sampling=request.sampling,
                    samples=samples,
                )
            )
        return AnswerRecord(
            format=FORMAT,
            id=self._answer_id,
            caller_id=generation.caller_id,
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            model=self._served.names[0],
            source=self._served.source,
            max_model_len=self._served.max_model_len,
            num_rescues=sum([flight.num_rescues for flight in generation.flights.values()]),
            requests=requests,
        )

    def _note(self, output: Output) -> None:
        key = output.request_id, output.sample_index
        noted = self._noted.get(key)
        if noted is None:
            noted = self._noted[key] = _Noted()
        if output.origin is not None and noted.origins[-1:] != [output.origin]:
            noted.origins.append(output.origin)
        noted.token_ids += output.token_ids
        found = output.logprobs or []
        noted.whole &= len(found) == len(output.token_ids)
        noted.bits += [float_bits(entry.logprob) for entry in found]


class Recorder:
    """Keeps the latest answers in a folder, within bounds; several gateways may share it."""

    def __init__(self, folder: Path, *, max_answers: int, max_bytes: int, log: logging.Logger) -> None:
        """A folder that cannot be written is said, and may be mended later: who starts a server checks it
        with ``prepare_folder``, and a gateway that starts again beside others must serve."""
        self._folder = folder
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._log = log
        self._room = threading.BoundedSemaphore(MAX_WAITING)
        self._own: set[str] = set()  # names of files that are known to be records
        self._said: dict[str, float] = {}  # what was said, and when
        self._thread = ThreadPoolExecutor(1, "recorder")
        try:
            prepare_folder(folder)
        except UsageError as error:
            self._complain("write", f"answers are not recorded: {error.message.removeprefix('--record ')}")

    def begin(self, answer_id: str, served: ServedModel) -> Recording:
        return Recording(answer_id, served)

    def keep(self, record: AnswerRecord) -> None:
        """Writes it soon; what cannot be written is said once, and lost. Never raises: the caller has an
        answer to give."""
        if not self._room.acquire(blocking=False):
            self._complain("slow", f"the disk is too slow for it, {record.id} is not recorded")
            return
        try:
            self._thread.submit(self._write, record)
        except RuntimeError:  # closed: the server stops
            self._room.release()
            self._complain("closed", f"{record.id} ended too late, it is not recorded")

    def close(self) -> None:
        """Returns when everything is written."""
        self._thread.shutdown()

    def _write(self, record: AnswerRecord) -> None:
        try:
            content = encode_record(record)
            if len(content) > self._max_bytes:
                self._complain("large", f"{record.id} takes {len(content)} bytes, more than --record-mb")
                return
            write_record(self._folder, record.id, content)
        except Exception as error:
            self._complain(
                "write", f"{record.id} is not recorded, others may not be either: {self._words(error)}"
            )
            return
        finally:
            self._room.release()
        try:
            self._prune()
        except Exception as error:
            self._complain("prune", f"the oldest records cannot be dropped: {self._words(error)}")
        else:
            self._went_well()

    def _prune(self) -> None:
        """Drops the oldest records, and nothing that is not one. Looks at the folder itself, as others may
        write to it."""
        found = []
        own = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name not in self._own and not is_record(self._folder / entry.name):
                    continue
                own.add(entry.name)
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        self._own = own
        found.sort(reverse=True)
        total = 0
        for number, (_, name, size) in enumerate(found):
            total += size
            beyond = number >= self._max_answers or total > self._max_bytes
            # asked once more: another file may have got the name of a record since
            if beyond and is_record(self._folder / name):
                (self._folder / name).unlink(missing_ok=True)

    def _words(self, error: Exception) -> str:
        if isinstance(error, OSError) and error.strerror:
            return f"{self._folder}: {error.strerror}"
        return f"{type(error).__name__}: {error}"

    def _complain(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said[kind] = time.monotonic()
            self._log.warning("--record: %s", message)

    def _went_well(self) -> None:
        """What fails after this is said anew, though not when it fails now and then."""
        now = time.monotonic()
        for kind in ("write", "prune"):
            if now - self._said.get(kind, now) > QUIET_S:
                self._said.pop(kind, None)


def prepare_folder(folder: Path) -> None:
    """Makes a folder that its owner alone may read, unless it is there, and tries whether records can be
    written to it. Raises UsageError."""
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder, buffering=0) as probe:
            num_written = probe.write(bytes(PROBE_BYTES))
            if num_written < PROBE_BYTES:
                probe.write(bytes(PROBE_BYTES - num_written))  # says why the rest was not
    except OSError as error:
        raise UsageError(
            f"--record {folder}: cannot be written: {error.strerror}",
            hint="name a folder of your own, on a disk that has room",
            param="--record",
        ) from None
