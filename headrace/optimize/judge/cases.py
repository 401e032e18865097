"""One op of the table as a Problem: which calls it is judged on, and what they must give.

A case covers one way the op is called: rows, dtype, and for ops that attend the sequences behind the rows,
with their caches in shuffled or consecutive blocks. Which contexts and row counts is drawn from a seed that
the candidate never sees; those of the target and the limits of what it declares are always among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.core.packs import KernelEntry
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.blocks import dense_blocks
from headrace.kernels.linear import FEW_ROWS
from headrace.kernels.native.signature import SIGNATURES, Signature
from headrace.kernels.table import OpTable
from headrace.optimize.judge import contents, operands, quantized
from headrace.optimize.judge.problem import CONTENTS, Case, Problem, Tensors, TensorSpec
from headrace.optimize.judge.slots import call_specs, weight_specs
from headrace.optimize.modules.problem import ModuleProblem
from headrace.optimize.records import CallShape, Phase, Target

_MAX_CONTEXT = 640
"""Of verification; timing uses the target's own contexts."""
_ANY_ROWS = {"decode": 40, "prefill": 200}
"""The most rows that are looked at of a candidate that covers any number, but for the target's own."""


def problem_for(target: Target, entry: KernelEntry) -> Problem:
    """What candidates for ``target`` must compute."""
    if target.module:
        return ModuleProblem(target, entry)
    return OpProblem(target, entry)


class OpProblem:
    """``entry`` says which calls the candidate covers; only those are made."""

    def __init__(self, target: Target, entry: KernelEntry) -> None:
        self.target = target
        self.entry = entry
        self.op = target.op
        self._present = frozenset(target.present)
        self._weight_dtype: torch.dtype = getattr(torch, target.weight_dtype)
        self._kept: dict[str, tuple[Tensors, int, Any]] = {}
        self._rounds = entry.activations == "int8" and bool(target.weight_formats)

    def __reduce__(self) -> tuple[type[OpProblem], tuple[Target, KernelEntry]]:
        """Other processes make their own forms of the weights."""
        return OpProblem, (self.target, self.entry)

    @property
    def signature(self) -> Signature:
        return SIGNATURES[self.op]

    @property
    def layers(self) -> int:
        return self.target.layers

    def weights(self) -> list[TensorSpec]:
        norm_dtype = getattr(torch, self.target.norm_dtype) if self.target.norm_dtype else None
        formats = self.target.weight_formats
        return weight_specs(self.op, self.target.dims, self._present, self._weight_dtype, norm_dtype, formats)

    def verify_cases(self, seed: int) -> list[Case]:
        pick = random.Random(seed)
        cases: list[Case] = []
        for dtype in self.dtypes:
            for phase in self.entry.phases:
                for rows in self._rows(phase, pick):
                    for window in self.windows:
                        contexts = self.contexts(window, pick)
                        content = CONTENTS[len(cases) % 4]
                        cases.append(self._case(phase, rows, contexts, dtype, window, pick, content))
        return cases

    def timed_cases(self, seed: int) -> list[Case]:
        pick = random.Random(seed)
        cases = []
        for shape in self.target.shapes:
            # steps of any number of rows are float32 with a kernel that is the same at any
            dtype = "float32" if self.entry.batch_invariant else shape.dtype
            covered = dtype in self.entry.activation_dtypes and self.entry.covers_rows(shape.rows)
            if covered and shape.phase in self.entry.phases:
                contexts, window = [shape.context], self.windows[0]
                cases.append(self._case(shape.phase, shape.rows, contexts, dtype, window, pick, "normal"))
        return cases

    def fill_weights(self, weights: Tensors, seed: int) -> None:
        offsets = self.target.floats
        for place, (slot, tensor) in enumerate(weights.items()):
            if slot in self._in_blocks:
                quantized.fill_blocks(tensor, self._in_blocks[slot], seed + place)
            elif slot in ("q_norm", "k_norm"):
                contents.fill_gain(tensor, offsets.get("qk_norm_offset", 0.0), seed + place)
            elif slot.endswith("_norm"):
                contents.fill_gain(tensor, offsets.get("norm_offset", 0.0), seed + place)
            elif self.op == "rms_norm":
                contents.fill_gain(tensor, offsets.get("offset", 0.0), seed + place)
            elif slot == "sinks":
                contents.fill_activation(tensor, "normal", seed + place)
            else:
                contents.fill_weight(tensor, seed + place)

    def fill(self, case: Case, tensors: Tensors, content: str, seed: int) -> None:
        batch: AttentionBatch | None = case.plan
        for place, (slot, tensor) in enumerate(tensors.items()):
            if slot in ("cos", "sin", "out") or tensor.dtype is torch.int64:
                continue
            # what comes out of norms and products is never heavy-tailed as a residual stream is; and scores
            # in the hundreds would make the largest key a matter of how it was rounded into the cache
            tame = slot in ("keys", "values", "residual") or self.op in ("attention", "attention_block")
            kind = "normal" if tame and content in ("heavy", "large") else content
            contents.fill_activation(tensor, kind, seed + place)
        if "cos" in tensors:
            rows = tensors["cos"].shape[0]
            positions = batch.positions if batch is not None else torch.arange(rows) + seed % 1000
            contents.fill_angles(tensors["cos"], tensors["sin"], positions)
        if batch is not None:
            _fill_plan(tensors, batch)

    def nudge(self, case: Case, tensors: Tensors, seed: int) -> None:
        for slot in ("x", "v"):
            if slot in tensors:
                contents.nudge_rows(tensors[slot], seed)

    def nudge_weights(self, weights: Tensors, seed: int) -> bool:
        for place, (slot, tensor) in enumerate(weights.items()):
            if slot in self._in_blocks:
                quantized.nudge_blocks(tensor, self._in_blocks[slot], seed + place)
            elif tensor.dim() == 2:
                contents.nudge_weight(tensor, seed + place)
        return bool(weights)

    def reference(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        table = self._table(OpTable.reference())
        record = self._record("reference", table, case, weights)
        return self._run(table, record, case, operands.widened(tensors))

    def stock(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        table = self._table(operands.stock_table(self.target.weight_dtype))
        if case.precision is not None:
            tensors = operands.narrowed(tensors, case.precision)
        return self._run(table, self._record("stock", table, case, weights), case, tensors)

    def prepare(self, case: Case, weights: Tensors, tensors: Tensors, pack: str) -> Callable[[], Tensors]:
        table = operands.stock_table(self.target.weight_dtype)
        numbers = self._numbers(case)
        own = weights if pack and self._in_blocks else self._dense(weights, self._weight_dtype)
        record = operands.weight_record(self.op, table, own, numbers, case.floats, self._in_blocks)
        if pack:
            softcap = case.floats.get("softcap", 0.0)
            table = operands.with_pack(table, Path(pack), self.op, record, softcap)
        if not operands.any_rows_wide(pack) and case.precision is not None and case.shape.rows > FEW_ROWS:
            tensors = operands.narrowed(tensors, case.precision)  # as such steps run without it
        return operands.bind(self.op, table, record, tensors, numbers, case.floats, case.plan)

    def _table(self, table: OpTable) -> OpTable:
        """``table``, its activations rounded as the candidate says that it rounds them."""
        return quantized.rounding(table) if self._rounds else table

    @cached_property
    def _in_blocks(self) -> dict[str, TensorSpec]:
        return {spec.slot: spec for spec in self.weights() if spec.parts}

    def _dense(self, weights: Tensors, dtype: torch.dtype) -> Tensors:
        """Blocks as plain matrices, other weights as they are."""
        found = dict(weights)
        for slot, spec in self._in_blocks.items():
            found[slot] = dense_blocks(weights[slot], spec.matrix[1]).to(dtype)
        return found

    def _record(self, kind: str, table: OpTable, case: Case, weights: Tensors) -> Any:
        """The weights as ``table`` wants them, made once as long as it is the same dictionary."""
        window = case.ints.get("window", 0)
        kept = self._kept.get(kind)
        if kept is None or kept[0] is not weights or kept[1] != window:
            if kind == "reference":
                own = operands.widened(self._dense(weights, torch.float64))
            else:
                own = self._dense(weights, self._weight_dtype)
            record = operands.weight_record(self.op, table, own, self._numbers(case), case.floats)
            kept = self._kept[kind] = (weights, window, record)
        return kept[2]

    def _run(self, table: OpTable, record: Any, case: Case, tensors: Tensors) -> Tensors:
        numbers = self._numbers(case)
        with torch.inference_mode():
            found = operands.bind(self.op, table, record, tensors, numbers, case.floats, case.plan)()
        kinds = {spec.slot: spec.dtype for spec in case.tensors}
        shaped = {slot: found[slot].view(tensors[slot].shape) for slot in case.slots("output", "inout")}
        return {
            slot: each if each.dtype is torch.float64 else each.to(kinds[slot])
            for slot, each in shaped.items()
        }

    def _numbers(self, case: Case) -> dict[str, int]:
        return {**self.target.dims, **case.ints}

    @cached_property
    def dtypes(self) -> list[str]:
        return [dtype for dtype in ("float32", "bfloat16") if dtype in self.entry.activation_dtypes]

    @cached_property
    def windows(self) -> list[int]:
        """Sliding windows that the model's layers have; 0 is none."""
        window, widest = self.target.dims.get("window", 0), self.target.dims.get("max_window", 0)
        return [window] if not widest else [0, widest]

    def _rows(self, phase: str, pick: random.Random) -> list[int]:
        """Row counts: the least, the most, the target's own, and hidden ones between. In float32 too: a
        pack may make steps of any number so."""
        own = {shape.rows for shape in self.target.shapes if shape.phase == phase}
        most = self.entry.max_rows or max(_ANY_ROWS[phase], *own, 1)
        least = 2 if phase == "prefill" and self.signature.has_batch else 1
        rows = {
            least,
            most,
            pick.randint(least, max(least, most)),
            pick.randint(least, max(least, most)),
        } | own
        return sorted(count for count in rows if least <= count <= most)

    def contexts(self, window: int, pick: random.Random) -> list[int]:
        size = self.target.dims.get("block_size", 16)
        edges = [0, size - 1, size, 3 * size - 1, pick.randint(1, 200), pick.randint(200, _MAX_CONTEXT - 40)]
        if window and window < _MAX_CONTEXT:
            edges += [window - 1, window, window + pick.randint(1, 30)]
        pick.shuffle(edges)
        return edges

    def _case(
        self,
        phase: str,
        rows: int,
        contexts: Sequence[int],
        dtype: str,
        window: int,
        pick: random.Random,
        content: str,
    ) -> Case:
        kind: Phase = "prefill" if phase == "prefill" else "decode"
        entries, num_blocks = list[BatchEntry](), 0
        if self.signature.has_batch:
            entries, num_blocks = _entries(kind, rows, contexts, self.target.dims["block_size"], pick)
        return self.case(kind, rows, entries, num_blocks, dtype, window, content, pick.getrandbits(48))

    def case(
        self,
        phase: Phase,
        rows: int,
        entries: Sequence[BatchEntry],
        num_blocks: int,
        dtype: str,
        window: int,
        content: str,
        seed: int,
    ) -> Case:
        """One call; for ops that attend, of these sequences over a cache of ``num_blocks``."""
        dims = self.target.dims
        batch, ints = None, {name: dims[name] for name in self.signature.ints if name in dims}
        context = 0
        if self.signature.has_batch:
            batch = AttentionBatch.build(entries, dims["block_size"])
            ints |= {"num_decodes": batch.num_decodes, "window": window}
            context = max(batch.decode_lens_list, default=0) or batch.prefills[0].context_len
        cache_dtype = self._weight_dtype
        specs = call_specs(
            self.op, dims, self._present, rows, getattr(torch, dtype), cache_dtype, batch, num_blocks
        )
        shape = CallShape(
            phase=phase, rows=rows, context=context, calls_per_step=1.0, dtype=dtype, dims=dict(dims)
        )
        assert set(ints) == set(self.signature.ints), f"{self.op}: {set(self.signature.ints) - set(ints)}"
        floats = {name: self.target.floats[name] for name in self.signature.floats}
        # a row that is the same at any number of rows is as exact as stock is at many
        same = self.entry.batch_invariant and dtype == "float32" and self._serves_half
        precision = torch.bfloat16 if same else None
        return Case(shape, tuple(specs), ints, floats, content, seed, batch, precision)

    @property
    def _serves_half(self) -> bool:
        """Whether stock computes steps of many rows in bfloat16."""
        return self._weight_dtype is torch.bfloat16


def _entries(
    phase: Phase, rows: int, contexts: Sequence[int], block_size: int, pick: random.Random
) -> tuple[list[BatchEntry], int]:
    """Sequences for ``rows`` rows, and how many blocks their cache has. In prefill two chunks where there
    are rows enough, and now and then decodes before them; every other time a sequence's blocks are
    consecutive."""
    news = [1] * rows
    if phase == "prefill":
        decodes = 0 if rows < 6 or len(contexts) < 2 or pick.random() < 0.6 else pick.randint(1, 3)
        left = rows - decodes
        first = left if left < 8 or pick.random() < 0.5 else pick.randint(2, left - 2)
        news = [1] * decodes + [first] + ([left - first] if left > first else [])
    spans = [(contexts[index % len(contexts)], new) for index, new in enumerate(news)]
    counts = [-(-(context + new) // block_size) for context, new in spans]
    num_blocks = sum(counts) + 4
    ids = list(range(1, num_blocks))
    shuffled = ids[:]
    pick.shuffle(shuffled)
    entries, used = [], 0
    scattered = len(contexts) > 1 and pick.random() < 0.5
    for (context, new), count in zip(spans, counts, strict=True):
        blocks = (shuffled if scattered else ids)[used : used + count]
        entries.append(BatchEntry(context, new, blocks))
        used += count
    return entries, num_blocks


def _fill_plan(tensors: Tensors, batch: AttentionBatch) -> None:
    tensors["slot_mapping"].copy_(batch.slot_mapping)
    tensors["block_tables"].copy_(batch.decode_block_tables)
    tensors["lens"].copy_(batch.decode_lens)
    if "chunks" in tensors:
        tensors["chunk_tables"].zero_()
        for index, chunk in enumerate(batch.prefills):
            row = torch.tensor([chunk.start, chunk.end, chunk.context_len])
            tensors["chunks"][index] = row
            tensors["chunk_tables"][index, : len(chunk.block_table)] = chunk.block_table


def untouched(case: Case, slot: str, tensor: Tensor) -> Tensor:
    """Which elements of an inout must stay as they are, as a mask over its shape."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    if slot in ("keys", "values"):
        mask[:] = True
        mask[:, case.plan.slot_mapping] = False
    return mask
