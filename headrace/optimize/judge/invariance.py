"""Is a row's result the same whatever else its call holds? The same bits, or it is not.

A few sequences are fixed: tokens that are cached, and rows that come after them. One call computes all rows,
and says what their bits are. Then they are computed anew in other company: alone and in batches, in chunks
cut elsewhere, as decodes and as prefill, in other blocks of the cache, on other numbers of threads. Each call
finds in its cache what the first one wrote there.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from headrace.kernels.batch import BatchEntry
from headrace.optimize.judge.build import Built
from headrace.optimize.judge.cases import OpProblem
from headrace.optimize.judge.compare import same_bits
from headrace.optimize.judge.layout import Layout
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.problem import Case, Tensors
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.runner import Runner, build_runner
from headrace.optimize.judge.sandbox import MIB

Piece: TypeAlias = "tuple[int, int, int]"
"""A sequence, its first row in a call, and the row after its last."""

_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64)
"""Rows of calls and chunks: around the tiles that kernels have."""
_DECODES = (1, 1, 1, 2, 3, 4, 5, 8, 13)
_MOST_ROWS = 90
_OUT_BYTES = 16 * MIB
_ROW_SLOTS = ("x", "q", "k", "v", "residual", "cos", "sin")
_CACHE = ("keys", "values")


def check_invariance(built: Built, options: JudgeOptions) -> None:
    """Raises Rejected("not_invariant") when a row's bits depend on anything but itself."""
    seed = secrets.randbits(48) if options.seed is None else options.seed
    problem = built.problem
    assert isinstance(problem, OpProblem)
    for number, window in enumerate(problem.windows):
        pick = random.Random(seed + number)
        worlds = [_World(problem, dtype, window, pick) for dtype in problem.dtypes]
        for threads in dict.fromkeys((options.num_threads, 1, options.num_threads + 1)):
            _run(built, worlds, threads, seed + number, options)


def _run(built: Built, worlds: list[_World], threads: int, seed: int, options: JudgeOptions) -> None:
    problem = built.problem
    cases = [case for world in worlds for case in world.cases]
    layout = Layout(problem.signature, problem.weights(), 1, cases, [0] * len(cases), threads)
    try:
        with Runner(
            built.sandbox, build_runner(), built.library, layout, perturb=True, timeout_s=options.load_s
        ) as runner:
            runner.load()
            if layout.num_sets:
                problem.fill_weights(layout.weights(0), seed)
            runner.pack()
            index = 0
            for world in worlds:
                for number in range(len(world.cases)):
                    world.fill(number, layout.call(index))
                    layout.poison(index)
                    runner.snap(index, options.call_s)
                    world.compare(number, layout.call(index) | layout.snapshots(index), threads)
                    index += 1
    finally:
        layout.close()


@dataclass
class _Sequence:
    """``context`` tokens are cached before its ``rows``. What is known of it comes with the first call: rows'
    inputs by slot, the cache by position, and results by slot, one for each row."""

    context: int
    rows: int
    inputs: Tensors = field(default_factory=dict)
    cache: Tensors = field(default_factory=dict)
    results: Tensors = field(default_factory=dict)


class _World:
    """The sequences and calls of one dtype and window; ``cases[0]`` computes every row."""

    def __init__(self, problem: OpProblem, dtype: str, window: int, pick: random.Random) -> None:
        self._problem, self._dtype, self._window = problem, dtype, window
        self._seed = pick.getrandbits(48)
        self._content = pick.choice(("normal", "normal", "heavy"))
        most = problem.entry.max_rows or _MOST_ROWS
        self._attends = problem.signature.has_batch
        if self._attends and "prefill" in problem.entry.phases and most > 1:
            self._sequences, self._calls = self._chunked(most, pick)
        else:
            self._sequences, self._calls = self._rows(most, pick)
        made = [self._case(pieces, pick) for pieces in self._calls]
        self.cases = [case for case, _ in made]
        self._slots = [slots for _, slots in made]

    def fill(self, number: int, tensors: Tensors) -> None:
        """A call's inputs and cache, in place."""
        first = not self._sequences[0].inputs
        self._problem.fill(self.cases[number], tensors, self._content, self._seed + number)
        row = 0
        for (which, start, end), slots in zip(self._calls[number], self._slots[number], strict=True):
            sequence = self._sequences[which]
            rows = slice(row, row + end - start)
            row += end - start
            if first:
                sequence.inputs = {
                    slot: tensors[slot][rows].clone() for slot in _ROW_SLOTS if slot in tensors
                }
                sequence.cache = {
                    slot: tensors[slot][:, slots[: sequence.context]].clone()
                    for slot in _CACHE
                    if slot in tensors
                }
            for slot, known in sequence.inputs.items():
                tensors[slot][rows] = known[start:end]
            for slot, known in sequence.cache.items():
                tensors[slot][:, slots[: sequence.context]] = known
                if start:
                    there = slots[sequence.context : sequence.context + start]
                    tensors[slot][:, there] = sequence.results[slot][:start].transpose(0, 1)

    def compare(self, number: int, found: Tensors, threads: int) -> None:
        """The first call's results are kept, all others' compared with them."""
        row = 0
        for (which, start, end), slots in zip(self._calls[number], self._slots[number], strict=True):
            sequence = self._sequences[which]
            own = {
                slot: found[slot][row : row + end - start]
                for slot in self.cases[number].slots("output", "inout")
                if slot not in _CACHE
            }
            row += end - start
            there = slots[sequence.context + start : sequence.context + end]
            own |= {slot: found[slot][:, there].transpose(0, 1) for slot in sequence.cache}
            if not sequence.results:
                sequence.results = {slot: tensor.clone() for slot, tensor in own.items()}
            for slot, tensor in own.items():
                self._same(number, slot, tensor, sequence, start, threads)

    def _same(
        self, number: int, slot: str, found: Tensor, sequence: _Sequence, start: int, threads: int
    ) -> None:
        known = sequence.results[slot][start : start + found.shape[0]]
        if same_bits(found, known):
            return
        wrong = [row for row in range(found.shape[0]) if not same_bits(found[row], known[row])]
        position = f", position {sequence.context + start + wrong[0]}" if self._attends else ""
        raise Rejected(
            "not_invariant",
            f"{slot}: {len(wrong)} of {found.shape[0]} rows have other bits in {self._company(number)} on "
            f"{threads} threads than in {self._company(0)} ({self._dtype}{position})",
        )

    def _company(self, number: int) -> str:
        sizes = [end - start for _, start, end in self._calls[number]]
        if not self._attends:
            return f"a call of {len(sizes)} rows"
        chunks = [str(size) for size in sizes if size > 1]
        decodes = f"{sizes.count(1)} decodes" if 1 in sizes else ""
        return f"a step of {decodes}{' and ' if decodes and chunks else ''}" + (
            f"chunks of {', '.join(chunks)} rows" if chunks else ""
        )

    def _rows(self, most: int, pick: random.Random) -> tuple[list[_Sequence], list[list[Piece]]]:
        """Rows that know nothing of each other: those of ops that do not attend, and decodes."""
        width = max(self._problem.target.dims.get("out_features", 1), 1)
        count = max(min(most, 2), min(most, 24 if self._attends else _MOST_ROWS, _OUT_BYTES // (4 * width)))
        sequences = [_Sequence(context, 1) for context in self._contexts(count, pick)]
        calls = [[(index, 0, 1) for index in range(count)]]
        for size in [size for size in _SIZES if size < count] + [count]:
            calls.append([(index, 0, 1) for index in pick.sample(range(count), size)])
        return sequences, calls

    def _chunked(self, most: int, pick: random.Random) -> tuple[list[_Sequence], list[list[Piece]]]:
        sizes = [min(size, most) for size in (pick.randint(34, 50), pick.randint(9, 20), pick.randint(2, 6))]
        while sum(sizes) > most and len(sizes) > 1:
            sizes.pop()
        sequences = [
            _Sequence(context, size)
            for context, size in zip(self._contexts(len(sizes), pick), sizes, strict=True)
        ]

        def cut(size: int) -> Piece:
            """Some rows of some sequence."""
            which = pick.choice([index for index, each in enumerate(sequences) if each.rows >= size])
            start = pick.randint(0, sequences[which].rows - size)
            return which, start, start + size

        whole = [(index, 0, each.rows) for index, each in enumerate(sequences)]
        calls = [whole] + [[piece] for piece in whole if len(whole) > 1]
        calls += [[cut(size)] for size in _SIZES if 1 < size <= sizes[0]]
        if "decode" in self._problem.entry.phases:
            calls += [[cut(1) for _ in range(count)] for count in _DECODES if count <= most]
        for decodes in (1, 3, 9):  # beside chunks
            chunks = [cut(pick.randint(2, min(sizes[0], 12))), cut(pick.randint(2, min(sizes[0], 12)))]
            mixed = [cut(1) for _ in range(decodes)] + chunks
            if sum(end - start for _, start, end in mixed) <= most:
                calls.append(mixed)
        return sequences, calls

    def _contexts(self, count: int, pick: random.Random) -> list[int]:
        if not self._attends:
            return [0] * count
        found: list[int] = []
        while len(found) < count:
            found += self._problem.contexts(self._window, pick)
        return found[:count]

    def _case(self, pieces: Sequence[Piece], pick: random.Random) -> tuple[Case, list[Tensor]]:
        """A call, and for each of its pieces the cache's slots by position."""
        rows = sum(end - start for _, start, end in pieces)
        phase = "prefill" if self._attends and any(end - start > 1 for _, start, end in pieces) else "decode"
        entries, tables, num_blocks = list[BatchEntry](), list[Tensor](), 1
        if self._attends:
            size = self._problem.target.dims["block_size"]
            ends = [self._sequences[which].context + end for which, _, end in pieces]
            counts = [-(-end // size) for end in ends]
            num_blocks = sum(counts) + 4
            blocks = list(range(1, num_blocks))
            if pick.random() < 0.6:
                pick.shuffle(blocks)
            for (which, start, end), count in zip(pieces, counts, strict=True):
                own, blocks = blocks[:count], blocks[count:]
                entries.append(BatchEntry(self._sequences[which].context + start, end - start, own))
                places = torch.tensor(own)[:, None] * size + torch.arange(size)
                tables.append(places.flatten())
        else:
            tables = [torch.empty(0, dtype=torch.int64)] * len(pieces)
        case = self._problem.case(
            phase,  # type: ignore[arg-type]
            rows,
            entries,
            num_blocks,
            self._dtype,
            self._window,
            self._content,
            pick.getrandbits(48),
        )
        return case, tables
