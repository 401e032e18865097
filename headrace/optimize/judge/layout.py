"""Where the tensors of calls lie in the two shared memories, and the table that tells the runner.

    inputs     weights and inputs           the runner maps it read-only
    outputs    outputs and inouts, and the copies that it takes as a call returns

    │ pattern … │ tensor │ pattern to the page's end │ page that may not be touched │ pattern … │ tensor │

A tensor ends, but for its alignment, where a page ends: reading or writing past it ends the candidate, and
writing before it shows in the pattern.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import UnavailableError
from headrace.kernels.native.abi import ALIGNMENT, DTYPES, MAX_DIMS
from headrace.kernels.native.signature import CALL_INTS, Signature
from headrace.optimize.judge.problem import Case, Tensors, TensorSpec

PAGE = 4096
PATTERN = 0xA5
_BEFORE = 256
"""Bytes of pattern before a tensor that are looked at."""

NONE, INPUTS, OUTPUTS = 0, 1, 2
_ROLES = {"input": 0, "weight": 1, "inout": 2, "output": 3}
_RECORD_WORDS = 7 + 2 * MAX_DIMS
_SEAL_FUTURE_WRITE = 0x10
_MAGIC = 0x68725F7461626C65


@dataclass(frozen=True)
class Place:
    """Where one tensor lies; ``region`` NONE: absent or empty. ``snapshot`` is the offset of its copy, -1:
    none is taken."""

    spec: TensorSpec
    region: int
    offset: int
    snapshot: int = -1

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


class Memory:
    """Shared memory that the parent writes and a child maps through ``descriptor``."""

    def __init__(self, descriptor: int, size: int, access: int = mmap.ACCESS_DEFAULT) -> None:
        self.descriptor, self.size = descriptor, size
        self.map = mmap.mmap(descriptor, size, access=access)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    @classmethod
    def create(cls, name: str, size: int, *, writable: bool) -> Memory:
        """``writable``: whether a child may map it for writing."""
        size = max(PAGE, size)
        descriptor = os.memfd_create(f"headrace-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            memory = cls(descriptor, size)
        except (OSError, OverflowError) as error:
            os.close(descriptor)
            raise UnavailableError(
                f"the calls that a candidate is judged on need {size / (1 << 30):.3g} GiB of {name}: {error}",
                hint="name smaller shapes in the target, or judge on a machine with more memory",
            ) from None
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        # our own mapping stays writable; nobody can make another one that is
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals if writable else seals | _SEAL_FUTURE_WRITE)
        return memory

    @classmethod
    def attach(cls, descriptor: int, size: int) -> Memory:
        """In a child: sees what the parent writes; what is written here stays here."""
        return cls(descriptor, size, mmap.ACCESS_COPY)

    def tensor(self, spec: TensorSpec, offset: int) -> Tensor:
        flat = self.bytes[offset : offset + spec.nbytes].view(spec.dtype)
        return flat.as_strided(spec.shape, spec.strides)

    def close(self) -> None:
        os.close(self.descriptor)


class Layout:
    """The memory of some calls. ``sets`` of weights are filled each by itself; call i uses ``set_of[i]``."""

    def __init__(
        self,
        signature: Signature,
        weights: Sequence[TensorSpec],
        sets: int,
        cases: Sequence[Case],
        set_of: Sequence[int],
        threads: int,
    ) -> None:
        self.signature, self.cases, self.set_of, self.threads = signature, list(cases), list(set_of), threads
        self._used = {INPUTS: 0, OUTPUTS: 0}
        self.weight_places = [{spec.slot: self._place(spec) for spec in weights} for _ in range(sets)]
        self.call_places = [{spec.slot: self._place(spec) for spec in case.tensors} for case in cases]
        self.num_sets = sets if weights else 0
        self.inputs = Memory.create("inputs", self._used[INPUTS], writable=False)
        self.outputs = Memory.create("outputs", self._used[OUTPUTS], writable=True)
        self.table = Memory.create("table", len(self._table()), writable=False)
        self.table.map[: len(self._table())] = self._table()
        self.paint()

    def weights(self, index: int) -> Tensors:
        """One set's tensors by slot, in the shared memory itself."""
        return {slot: self._tensor(place) for slot, place in self.weight_places[index].items()}

    def call(self, index: int) -> Tensors:
        """One call's tensors by slot but for its weights, in the shared memory itself."""
        return {slot: self._tensor(place) for slot, place in self.call_places[index].items()}

    def snapshots(self, index: int) -> Tensors:
        """What outputs held the moment the call returned."""
        return {
            slot: self.outputs.tensor(place.spec, place.snapshot)
            for slot, place in self.call_places[index].items()
            if place.snapshot >= 0
        }

    def poison(self, index: int) -> None:
        """NaN in every output of a call, and in the copies."""
        for place in self.call_places[index].values():
            if place.spec.role != "output" or place.region == NONE:
                continue
            for offset in (place.offset, place.snapshot):
                poison(self.outputs.tensor(place.spec, offset))

    def paint(self) -> None:
        """The pattern around every tensor."""
        for start, stop, memory, _ in self._zones():
            memory.bytes[start:stop] = PATTERN

    def damage(self) -> str:
        """The slot beside which something was written; empty if nothing was."""
        for start, stop, memory, slot in self._zones():
            if bool((memory.bytes[start:stop] != PATTERN).any()):
                return slot
        return ""

    def find(self, region: int, offset: int) -> tuple[str, bool]:
        """The slot at or next to an offset, and whether the offset lies within its tensor."""
        nearest, distance = "", 1 << 62
        for places in (*self.weight_places, *self.call_places):
            for slot, place in places.items():
                if place.region != region:
                    continue
                if place.offset <= offset < place.end:
                    return slot, True
                away = min(abs(offset - place.offset), abs(offset - place.end))
                if away < distance:
                    nearest, distance = slot, away
        return nearest, False

    @property
    def weight_bytes(self) -> int:
        """Of one set."""
        return sum(place.spec.nbytes for place in self.weight_places[0].values()) if self.weight_places else 0

    def close(self) -> None:
        for memory in (self.inputs, self.outputs, self.table):
            memory.close()

    def _place(self, spec: TensorSpec) -> Place:
        if spec.nbytes == 0:
            return Place(spec, NONE, 0)
        region = INPUTS if spec.role in ("input", "weight") else OUTPUTS
        offset = self._allot(region, spec.nbytes)
        snapshot = self._allot(region, spec.nbytes) if spec.role == "output" else -1
        return Place(spec, region, offset, snapshot)

    def _allot(self, region: int, nbytes: int) -> int:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        pages = -(-(size + _BEFORE) // PAGE) * PAGE
        start = self._used[region]
        self._used[region] = start + pages + PAGE
        return start + pages - size

    def _memory(self, place: Place) -> Memory:
        return self.inputs if place.region == INPUTS else self.outputs

    def _tensor(self, place: Place) -> Tensor:
        if place.region == NONE:
            return torch.empty(place.spec.shape, dtype=place.spec.dtype)
        return self._memory(place).tensor(place.spec, place.offset)

    def _zones(self) -> list[tuple[int, int, Memory, str]]:
        """Stretches of pattern that the candidate could write to: only those in ``outputs``."""
        zones = []
        for places in self.call_places:
            for slot, place in places.items():
                if place.region == OUTPUTS:
                    page_end = -(-place.end // PAGE) * PAGE
                    zones.append((place.offset - _BEFORE, place.offset, self.outputs, slot))
                    zones.append((place.end, page_end, self.outputs, slot))
        return zones

    def _table(self) -> bytes:
        """The structs of runner.c: header, calls, tensors, ints, floats."""
        calls, records = list[bytes](), list[bytes]()
        ints, floats = list[int](), list[float]()
        for case, places, index in zip(self.cases, self.call_places, self.set_of, strict=True):
            own = places | (self.weight_places[index] if self.num_sets else {})
            signature = self.signature
            sizes = (len(signature.slots), len(records), len(signature.ints), len(ints))
            weight_set = index if self.num_sets else -1
            calls.append(struct.pack("=7q", *sizes, len(signature.floats), len(floats), weight_set))
            records += [_record(own.get(slot.name)) for slot in signature.slots]
            # once for the call, once for packing: there the numbers of a single call are 0
            ints += [int(case.ints[name]) for name in signature.ints]
            ints += [0 if name in CALL_INTS else int(case.ints[name]) for name in signature.ints]
            floats += [float(case.floats[name]) for name in signature.floats]
        header = (_MAGIC, len(calls), len(records), len(ints), len(floats), self.num_sets, self.threads)
        numbers = struct.pack(f"={len(ints)}q{len(floats)}d", *ints, *floats)
        return struct.pack("=7q", *header) + b"".join(calls) + b"".join(records) + numbers


def poison(tensor: Tensor) -> None:
    """NaN, or for integers the least value there is."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype is not torch.bool else True)


def _record(place: Place | None) -> bytes:
    if place is None or place.region == NONE:
        return struct.pack(f"={_RECORD_WORDS}q", NONE, 0, 0, 0, -1, *([0] * (_RECORD_WORDS - 5)))
    spec = place.spec
    dtype = DTYPES["blocks" if spec.parts else str(spec.dtype).removeprefix("torch.")]
    told = (spec.matrix, (0, 0)) if spec.parts else (spec.shape, spec.strides)
    shape, stride = (tuple(each) + (0,) * (MAX_DIMS - len(each)) for each in told)
    head = (
        place.region,
        _ROLES[spec.role],
        place.offset,
        spec.nbytes,
        place.snapshot,
        dtype,
        len(told[0]),
    )
    return struct.pack(f"={_RECORD_WORDS}q", *head, *shape, *stride)


def copied(tensors: Mapping[str, Tensor]) -> Tensors:
    """Private copies with the same shapes and strides."""
    found = {}
    for slot, tensor in tensors.items():
        flat = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        found[slot] = flat.copy_(tensor)
    return found
