"""Steps of one model on several packs in turns, in one process.

    python -m benchmarks.sides.invariance MODEL none|auto THREADS SECONDS OUT TOKENS NAME=FOLDER …

OUT is a folder. Prints one JSON line:

    times    {scenario: {name: [seconds of each round]}}; with one thread, seconds of its CPU time
    tokens   {scenario: tokens of a step}

and writes OUT/NAME.npy for each name: the logits after each token of TOKENS (JSON), one decode at a time.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headrace.core.packs import FORMATS
from headrace.engine.model_runner import KVGeometry
from headrace.kernels import stock
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.native.coverage import computes_steps
from headrace.kernels.native.pack import Packable, load_pack
from headrace.kernels.table import OpTable
from headrace.models.causal_lm import CausalLM
from headrace.models.load import load_model
from headrace.models.resolve import resolve_model

BLOCK_SIZE = 16
LEAST_ROUNDS = 7
CPU = torch.device("cpu")
FIXED = "fixed"

# (tokens already cached, tokens of this step) of each sequence
SCENARIOS: dict[str, list[tuple[int, int]]] = {
    "decode_1": [(100, 1)],
    "decode_8": [(32 + 480 * i // 7, 1) for i in range(8)],
    "decode_8_at_129": [(128, 1)] * 8,
    "decode_64": [(32 + 480 * i // 63, 1) for i in range(64)],
    "decode_2000": [(2000, 1)],
    "prefill_512": [(0, 512)],
}


class Steps:
    """One model and the tables that take turns."""

    def __init__(self, model: CausalLM, tables: dict[str, OpTable]) -> None:
        self.model = model
        self.tables = tables
        self._geometry = KVGeometry(list(model.config.kv_specs), BLOCK_SIZE, torch.bfloat16)

    def use(self, name: str) -> None:
        self.model.ops = self.tables[name]

    def step(self, tokens: Tensor, entries: list[BatchEntry], kv: list[LayerKV]) -> Tensor:
        """(rows that are each entry's last, vocab)"""
        batch = AttentionBatch.build(entries, BLOCK_SIZE)
        hidden = self.model.forward(tokens, batch, kv)
        ends = list(itertools.accumulate(entry.num_new_tokens for entry in entries))
        return self.model.logits(hidden if len(ends) == len(hidden) else hidden[[end - 1 for end in ends]])

    def scenario(self, sequences: list[tuple[int, int]]) -> Callable[[], Tensor]:
        """A call that computes the step: the same tokens on the same cache whenever it is called."""
        needed = [-(-(cached + new) // BLOCK_SIZE) for cached, new in sequences]
        starts = [0, *itertools.accumulate(needed)]
        kv = self._geometry.allocate(starts[-1], CPU)
        entries = []
        for (cached, new), first, end in zip(sequences, starts, starts[1:], strict=False):
            table = list(range(first, end))
            if cached:
                self.step(self._random(cached, first), [BatchEntry(0, cached, table)], kv)
            entries.append(BatchEntry(cached, new, table))
        tokens = self._random(sum(new for _, new in sequences), -1)
        return lambda: self.step(tokens, entries, kv)

    def decoded(self, tokens: list[int]) -> np.ndarray:
        """(tokens, vocab) logits, a decode at a time."""
        count = -(-len(tokens) // BLOCK_SIZE)
        kv = self._geometry.allocate(count, CPU)
        rows = [
            self.step(torch.tensor([token]), [BatchEntry(at, 1, list(range(count)))], kv)[0].clone()
            for at, token in enumerate(tokens)
        ]
        table: np.ndarray = torch.stack(rows).float().numpy()
        return table

    def _random(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(0, self.model.config.vocab_size, (count,), generator=generator)


def take_turns(
    steps: Steps, call: Callable[[], Tensor], seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each step by name: every name once a round, in the order that begins with another one."""
    names = list(steps.tables)
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.monotonic() + seconds
    for number in itertools.count():
        if number >= LEAST_ROUNDS and time.monotonic() >= end:
            return times
        first = number % len(names)
        for name in names[first:] + names[:first]:
            steps.use(name)
            began = clock()
            call()
            times[name].append(clock() - began)
    raise AssertionError("the loop ends by itself")


def load(model_name: str, quantization: Literal["auto", "none"], folders: dict[str, Path]) -> Steps:
    resolved = resolve_model(model_name, dtype="bfloat16", quantization=quantization)
    model = load_model(
        resolved.folder,
        dtype=torch.bfloat16,
        device=CPU,
        quantization=quantization,
        pack_formats=frozenset(FORMATS),
    ).model
    assert isinstance(model, Packable)
    tables = {}
    for name, folder in folders.items():
        table = load_pack(folder, model.ops, model)
        assert computes_steps(table, model.weights), name
        # what a pack that promises an order gets anyway: activations are float32 on every side
        tables[name] = table.replace(source=name, embedding=stock.embedding_float32)
    return Steps(model, tables)


@torch.inference_mode()
def measure(steps: Steps, seconds: float, threads: int) -> dict[str, Any]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    result: dict[str, Any] = {"times": {}, "tokens": {}}
    for scenario, sequences in SCENARIOS.items():
        steps.use(FIXED)
        call = steps.scenario(sequences)
        result["times"][scenario] = take_turns(steps, call, seconds, clock)
        result["tokens"][scenario] = sum(new for _, new in sequences)
    return result


@torch.inference_mode()
def main(arguments: list[str]) -> None:
    model, quantization, threads, seconds, out, tokens, *packs = arguments
    torch.set_num_threads(int(threads))
    form: Any = quantization
    steps = load(model, form, {name: Path(folder) for name, _, folder in (p.partition("=") for p in packs)})
    for name in steps.tables:
        steps.use(name)
        np.save(Path(out) / f"{name}.npy", steps.decoded(json.loads(tokens)))
    print(json.dumps(measure(steps, float(seconds), int(threads))))


if __name__ == "__main__":
    main(sys.argv[1:])
