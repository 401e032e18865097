"""Runs the model on a schedule: stages the step's arrays, computes, samples.

schedule.entries    │ one-token entries │ chunk │ chunk │ …      token rows in the same order
hidden (tokens, H)  │ every row that samples its entry's next token ─► logits ─► Sampler
                    │ every prompt row whose log-probability is asked for ─► logits, a slice at a time
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engine.block_io import BlockIO
from headrace.engine.logprobs import PromptLogprobs
from headrace.engine.sampler import SampledBatch, Sampler
from headrace.engine.schedule import Entry, Schedule
from headrace.engine.sequence import Sequence
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.models.causal_lm import CausalLM

# Logits are made for so many bytes' worth of rows at a time: a large vocabulary must not cost gigabytes.
_SAMPLE_LOGITS_BYTES = 256 * 1024**2
_PROMPT_LOGITS_BYTES = 64 * 1024**2
_LONG_TABLE = 64
KV_LAYOUT = "head-major"


@dataclass(frozen=True)
class KVGeometry:
    """Shape of the cache: ``layers`` holds (num_kv_heads, head_dim, v_head_dim) of each layer."""

    layers: list[tuple[int, int, int]]
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        return sum(
            LayerKV.bytes_per_block(self.block_size, heads, dim, v_dim, self.dtype)
            for heads, dim, v_dim in self.layers
        )

    @property
    def format(self) -> str:
        """What a block's bytes are, in words: two caches of one format can exchange blocks."""
        runs = [(shape, len(list(run))) for shape, run in itertools.groupby(self.layers)]
        shapes = "+".join(f"{count}x{heads}x({dim}+{v_dim})" for (heads, dim, v_dim), count in runs)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{KV_LAYOUT}/{dtype}/{self.block_size} tokens/{shapes}"

    def allocate(self, num_blocks: int, device: torch.device) -> list[LayerKV]:
        return [
            LayerKV.allocate(num_blocks, self.block_size, heads, dim, v_dim, self.dtype, device)
            for heads, dim, v_dim in self.layers
        ]


class ModelRunner:
    """One model with its cache and sampler. ``execute`` is called under ``torch.inference_mode``."""

    def __init__(
        self, model: CausalLM, kv: list[LayerKV], block_size: int, sampler: Sampler, device: torch.device
    ) -> None:
        self.model = model
        self._kv = kv
        self._block_size = block_size
        self.sampler = sampler
        self._device = device
        self.block_io = BlockIO(kv)
        self._row_bytes = 4 * model.config.vocab_size

    def execute(self, schedule: Schedule) -> SampledBatch:
        """Computes the schedule and samples: one token for each entry with ``samples``, in order."""
        entries = schedule.entries
        batch = AttentionBatch.build(
            [
                BatchEntry(sequence.num_computed_tokens, num_new_tokens, self._block_table(sequence))
                for sequence, num_new_tokens, _ in entries
            ],
            self._block_size,
            self._device,
        )
        hidden = self.model.forward(self._token_ids(schedule), batch, self._kv)
        return self._sample(entries, hidden)

    def wipe_spoiled(self, blocks: Collection[int]) -> set[int]:
        """Zeroes those of ``blocks`` that hold a number which is not finite, in every layer; returns them."""
        index = torch.tensor(sorted(blocks), dtype=torch.int64, device=self._device)
        stores = [store for layer in self._kv for store in (layer.key_blocks, layer.value_blocks)]
        sound = torch.ones(len(index), dtype=torch.bool, device=self._device)
        for store in stores:  # (heads, num_blocks, block_size * dim)
            sound &= store.index_select(1, index).isfinite().all(dim=-1).all(dim=0)
        spoiled = index[~sound]
        for store in stores:
            store.index_fill_(1, spoiled, 0.0)
        return set(spoiled.tolist())

    def warm_up(self) -> None:
        """Runs a prompt and a decode over block 0, so that the first request does not pay for what is
        built on first use; nothing refers to what this leaves in the block."""
        for count in {min(2, self._block_size), 1}:
            batch = AttentionBatch.build([BatchEntry(0, count, [0])], self._block_size, self._device)
            token_ids = torch.zeros(count, dtype=torch.int64, device=self._device)
            self.model.logits(self.model.forward(token_ids, batch, self._kv)[-1:])

    def _token_ids(self, schedule: Schedule) -> Tensor:
        """The step's token ids, (tokens,) int64."""
        num_decodes = schedule.num_decodes
        ids = [
            entry.sequence.tokens[entry.sequence.num_computed_tokens]
            for entry in schedule.entries[:num_decodes]
        ]
        if num_decodes == len(schedule.entries):
            return torch.from_numpy(np.array(ids, dtype=np.int64)).to(self._device)
        parts = [np.array(ids, dtype=np.int64)]
        for entry in schedule.entries[num_decodes:]:
            start = entry.sequence.num_computed_tokens
            parts.append(
                np.array(entry.sequence.tokens[start : start + entry.num_new_tokens], dtype=np.int64)
            )
        return torch.from_numpy(np.concatenate(parts)).to(self._device)

    def _block_table(self, sequence: Sequence) -> list[int] | array[int]:
        """The sequence's blocks; a long table as an array kept from step to step, since a list of
        thousands would be converted anew for every token."""
        table = sequence.block_table
        if len(table) < _LONG_TABLE:
            return table
        row = self.sampler.row(sequence)
        if row.num_preemptions != sequence.num_preemptions:
            row.num_preemptions, row.blocks = sequence.num_preemptions, array("q")
        if len(row.blocks) < len(table):
            row.blocks.extend(table[len(row.blocks) :])
        return row.blocks

    def _sample(self, entries: list[Entry], hidden: Tensor) -> SampledBatch:
        invalid_prompts: list[Sequence] = []
        if len(entries) == len(hidden) and all(
            entry.samples and entry.sequence.sampling.prompt_logprobs is None for entry in entries
        ):
            last_rows = hidden
        else:
            rows = []
            start = 0
            for entry in entries:
                end = start + entry.num_new_tokens
                if entry.sequence.sampling.prompt_logprobs is not None:
                    self._add_prompt_logprobs(entry, hidden[start:end])
                if entry.samples:
                    rows.append(end - 1)
                elif entry.sequence.prefill_only and not bool(hidden[start:end].isfinite().all()):
                    invalid_prompts.append(entry.sequence)
                start = end
            last_rows = hidden[torch.tensor(rows, dtype=torch.int64, device=self._device)]
        sequences = [entry.sequence for entry in entries if entry.samples]
        step = max(1, _SAMPLE_LOGITS_BYTES // self._row_bytes)
        sampled = SampledBatch([], invalid_prompts=invalid_prompts)
        for start in range(0, len(sequences), step):
            logits = self.model.logits(last_rows[start : start + step])
            sampled.extend(self.sampler.sample(logits, sequences[start : start + step]))
        return sampled

    def _add_prompt_logprobs(self, entry: Entry, hidden: Tensor) -> None:
        """Gathers what a chunk, (tokens, H), says about the prompt's next positions."""
        sequence = entry.sequence
        if sequence.num_sampled_tokens:
            return  # delivered; this is a recomputation
        start = sequence.num_computed_tokens
        row = self.sampler.row(sequence)
        if start == 0 or row.prompt_logprobs is None:
            row.prompt_logprobs = PromptLogprobs(sequence.sampling.prompt_logprobs or 0)
        known = min(start + 1, sequence.num_prompt_tokens)  # the rest is rescued output
        assert row.prompt_logprobs.num_positions == known, "prompt log-probabilities have a gap"
        next_tokens = sequence.tokens[
            start + 1 : min(start + len(hidden) + 1, sequence.num_prompt_tokens)
        ].tolist()
        step = max(1, _PROMPT_LOGITS_BYTES // self._row_bytes)
        for first in range(0, len(next_tokens), step):
            part = next_tokens[first : first + step]
            row.prompt_logprobs.add(self.model.logits(hidden[first : first + len(part)]), part)
