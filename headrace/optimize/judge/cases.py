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
from headrace.kernels.linear import FEW_ROWS
from headrace.kernels.native.signature import SIGNATURES, Signature
from headrace.kernels.table import OpTable
from headrace.optimize.judge import contents, operands
from headrace.optimize.judge.problem import CONTENTS, Case, Problem, Tensors, TensorSpec
from headrace.optimize.judge.slots import call_specs, weight_specs
from headrace.optimize.modules.problem import ModuleProblem
from headrace.optimize.records import CallShape, Phase, Target

_MAX_CONTEXT = 640
"""Of verification; timing uses the target's own contexts."""


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
        return weight_specs(self.op, self.target.dims, self._present, self._weight_dtype)

    def verify_cases(self, seed: int) -> list[Case]:
        pick = random.Random(seed)
        cases: list[Case] = []
        for dtype in self._dtypes:
            for phase in self.entry.phases:
                for rows in self._rows(dtype, phase, pick):
                    for window in self._windows:
                        contexts = self._contexts(window, pick)
                        cases.append(
                            self._case(phase, rows, contexts, dtype, window, pick, CONTENTS[len(cases) % 4])
                        )
        return cases

    def timed_cases(self, seed: int) -> list[Case]:
        pick = random.Random(seed)
        cases = []
        for shape in self.target.shapes:
            covered = shape.dtype in self.entry.activation_dtypes and self.entry.covers_rows(shape.rows)
            if covered and shape.phase in self.entry.phases:
                window = self._windows[0]
                cases.append(
                    self._case(shape.phase, shape.rows, [shape.context], shape.dtype, window, pick, "normal")
                )
        return cases

    def fill_weights(self, weights: Tensors, seed: int) -> None:
        offsets = self.target.floats
        for place, (slot, tensor) in enumerate(weights.items()):
            if slot in ("q_norm", "k_norm"):
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

    def reference(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        table = OpTable.reference()
        record = self._record("reference", table, case, weights)
        return self._run(table, record, case, operands.widened(tensors))

    def stock(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        table = operands.stock_table(self.target.weight_dtype)
        return self._run(table, self._record("stock", table, case, weights), case, tensors)

    def prepare(self, case: Case, weights: Tensors, tensors: Tensors, pack: str) -> Callable[[], Tensors]:
        table = operands.stock_table(self.target.weight_dtype)
        numbers = self._numbers(case)
        record = operands.weight_record(self.op, table, weights, numbers, case.floats)
        if pack:
            softcap = case.floats.get("softcap", 0.0)
            table = operands.with_pack(table, Path(pack), self.op, record, softcap)
        return operands.bind(self.op, table, record, tensors, numbers, case.floats, case.plan)

    def _record(self, kind: str, table: OpTable, case: Case, weights: Tensors) -> Any:
        """The weights as ``table`` wants them, made once as long as it is the same dictionary."""
        window = case.ints.get("window", 0)
        kept = self._kept.get(kind)
        if kept is None or kept[0] is not weights or kept[1] != window:
            own = operands.widened(weights) if kind == "reference" else weights
            record = operands.weight_record(self.op, table, own, self._numbers(case), case.floats)
            kept = self._kept[kind] = (weights, window, record)
        return kept[2]

    def _run(self, table: OpTable, record: Any, case: Case, tensors: Tensors) -> Tensors:
        numbers = self._numbers(case)
        with torch.inference_mode():
            found = operands.bind(self.op, table, record, tensors, numbers, case.floats, case.plan)()
        return {slot: found[slot].view(tensors[slot].shape) for slot in case.slots("output", "inout")}

    def _numbers(self, case: Case) -> dict[str, int]:
        return {**self.target.dims, **case.ints}

    @cached_property
    def _dtypes(self) -> list[str]:
        return [dtype for dtype in ("float32", "bfloat16") if dtype in self.entry.activation_dtypes]

    @cached_property
    def _windows(self) -> list[int]:
        """Sliding windows that the model's layers have; 0 is none."""
        window, widest = self.target.dims.get("window", 0), self.target.dims.get("max_window", 0)
        return [window] if not widest else [0, widest]

    def _rows(self, dtype: str, phase: str, pick: random.Random) -> list[int]:
        """Row counts: the least, the most, the target's own, and hidden ones between."""
        most = self.entry.max_rows
        if dtype == "float32" and self.target.weight_dtype == "bfloat16":
            most = min(most, FEW_ROWS)  # above, the engine computes in bfloat16
        least = 2 if phase == "prefill" and self.signature.has_batch else 1
        own = {shape.rows for shape in self.target.shapes if shape.phase == phase}
        rows = {
            least,
            most,
            pick.randint(least, max(least, most)),
            pick.randint(least, max(least, most)),
        } | own
        return sorted(count for count in rows if least <= count <= most)

    def _contexts(self, window: int, pick: random.Random) -> list[int]:
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
        dims = self.target.dims
        batch, num_blocks, ints = None, 0, {name: dims[name] for name in self.signature.ints if name in dims}
        context = 0
        if self.signature.has_batch:
            batch, num_blocks = _batch(kind, rows, contexts, dims["block_size"], pick)
            ints |= {"num_decodes": batch.num_decodes, "window": window}
            context = max(batch.decode_lens_list, default=0) or batch.prefills[0].context_len
        cache_dtype = self._weight_dtype
        specs = call_specs(
            self.op, dims, self._present, rows, getattr(torch, dtype), cache_dtype, batch, num_blocks
        )
        shape = CallShape(
            phase=kind, rows=rows, context=context, calls_per_step=1.0, dtype=dtype, dims=dict(dims)
        )
        assert set(ints) == set(self.signature.ints), f"{self.op}: {set(self.signature.ints) - set(ints)}"
        floats = {name: self.target.floats[name] for name in self.signature.floats}
        return Case(shape, tuple(specs), ints, floats, content, pick.getrandbits(48), batch)


def _batch(
    phase: Phase, rows: int, contexts: Sequence[int], block_size: int, pick: random.Random
) -> tuple[AttentionBatch, int]:
    """Sequences for ``rows`` rows, and how many blocks their cache has. In prefill two chunks where there
    are rows enough; every other time a sequence's blocks are consecutive."""
    news = [1] * rows
    if phase == "prefill":
        first = rows if rows < 8 or pick.random() < 0.5 else pick.randint(2, rows - 2)
        news = [first] + ([rows - first] if rows > first else [])
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
    return AttentionBatch.build(entries, block_size), num_blocks


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
