"""Scores given tokens with several op tables, beside what is served: passes between two steps.

    sequences │ group of 1 │ group of 2 │ … │      one group at a time, all of its sequences in one pass
    pass      │ the next ``chunk`` tokens of each; one token: the decode path │
    KV        │ a small cache of its own for each table: nothing is shared with the cache that serves │

The tables take turns within each pass, so that a busy neighbour slows them all alike.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import torch

from headrace.core.errors import EngineError, HeadraceError, InvalidRequestError
from headrace.core.messages import Failed, PackFailed, Score, Scored, Scores, TokenLogprobs
from headrace.engine.logprobs import token_logprobs
from headrace.engine.model_runner import KVGeometry
from headrace.engine.step_times import StepTimes
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.table import OpTable
from headrace.models.causal_lm import CausalLM

MAX_SEQUENCES = 64
MAX_TOKENS = 512
# Logits are made for so many bytes' worth of rows at a time.
_LOGITS_BYTES = 64 * 1024**2


class Scorer:
    """At most one job at a time, which ``advance`` brings on and which ends in one message."""

    def __init__(self, model: CausalLM, geometry: KVGeometry, device: torch.device) -> None:
        self._model = model
        self._geometry = geometry
        self._device = device
        self._job: _Job | None = None
        self._ended: list[Scores | PackFailed] = []

    @property
    def busy(self) -> bool:
        return self._job is not None

    def begin(self, score: Score, tables: Sequence[OpTable]) -> None:
        """Raises InvalidRequestError for what cannot be scored, or not now."""
        if self._job is not None:
            raise InvalidRequestError("other tokens are being scored", param="sequences")
        self._job = _Job(score, tables, self._model, self._geometry, self._device)

    def stop(self) -> None:
        """Drops the job: nobody waits for it."""
        self._job = None

    def advance(self, seconds: float) -> None:
        """As many passes of each table as ``seconds`` allow, one at least."""
        deadline = time.monotonic() + seconds
        self._step()
        while self._job is not None and time.monotonic() < deadline:
            self._step()

    def _step(self) -> None:
        job = self._job
        assert job is not None
        try:
            with torch.inference_mode():
                done = job.step()
        except Exception as error:
            cause = error if isinstance(error, HeadraceError) else EngineError(
                f"it failed on recorded tokens: {type(error).__name__}: {error}"
            )  # fmt: skip
            self._job = None
            self._ended.append(PackFailed(Failed.of_error("", cause)))
            return
        if done:
            self._job = None
            self._ended.append(Scores(job.result()))

    def take(self) -> list[Scores | PackFailed]:
        ended, self._ended = self._ended, []
        return ended


class _Job:
    def __init__(
        self,
        score: Score,
        tables: Sequence[OpTable],
        model: CausalLM,
        geometry: KVGeometry,
        device: torch.device,
    ) -> None:
        self._score = score
        self._model = model
        self._device = device
        self._tables = list(tables)
        self._block_size = geometry.block_size
        sequences = [_tokens(packed, model.config.vocab_size) for packed in score.sequences]
        if not 0 < len(sequences) <= MAX_SEQUENCES or min(score.groups, default=0) < 1 or score.chunk < 0:
            raise InvalidRequestError(f"1 to {MAX_SEQUENCES} sequences can be scored", param="sequences")
        self._groups: list[list[int]] = []  # numbers of sequences
        left = list(range(len(sequences)))
        for size in score.groups:
            self._groups.append(left[:size])
            left = left[size:]
        if left:
            raise InvalidRequestError("groups must cover all sequences", param="groups")
        self._groups = [group for group in self._groups if group]
        self._sequences = sequences
        self._blocks_each = -(-max(map(len, sequences)) // self._block_size)
        num_blocks = self._blocks_each * max(map(len, self._groups))
        self._caches = [geometry.allocate(num_blocks, device) for _ in tables]
        self._found: list[list[list[TokenLogprobs]]] = [[[] for _ in sequences] for _ in tables]
        self._times = [StepTimes() for _ in tables]
        self._position = 0
        self._num_passes = 0

    def step(self) -> bool:
        """One pass; whether it was the last."""
        group, start = self._groups[0], self._position
        # the last token is only looked at: nothing comes after it
        counts = {number: len(self._sequences[number]) - 1 - start for number in group}
        if self._score.chunk:
            counts = {number: min(count, self._score.chunk) for number, count in counts.items()}
        going = sorted((n for n in group if counts[n] > 0), key=lambda n: counts[n] > 1)
        entries = [BatchEntry(start, counts[n], self._block_table(group.index(n))) for n in going]
        ids = [token for n in going for token in self._sequences[n][start : start + counts[n]]]
        following = [token for n in going for token in self._sequences[n][start + 1 : start + 1 + counts[n]]]
        turn = self._num_passes % len(self._tables)
        for index in [*range(turn, len(self._tables)), *range(turn)]:
            rows = iter(self._pass(index, entries, ids, following))
            for number in going:
                self._found[index][number] += [next(rows) for _ in range(counts[number])]
        self._num_passes += 1
        self._position += self._score.chunk or max(counts.values())
        if all(len(self._sequences[n]) - 1 <= self._position for n in group):
            self._groups.pop(0)
            self._position = 0
        return not self._groups

    def result(self) -> list[Scored]:
        return [
            Scored(pack_id, found, times.medians())
            for pack_id, found, times in zip(self._score.pack_ids, self._found, self._times, strict=True)
        ]

    def _pass(
        self, index: int, entries: list[BatchEntry], ids: list[int], following: list[int]
    ) -> list[TokenLogprobs]:
        """What one table says of the tokens that follow ``ids``."""
        model, live, num_top = self._model, self._model.ops, self._score.num_top
        batch = AttentionBatch.build(entries, self._block_size, self._device)
        token_ids = torch.tensor(ids, dtype=torch.int64, device=self._device)
        step = max(1, _LOGITS_BYTES // (4 * model.config.vocab_size))
        found: list[TokenLogprobs] = []
        model.ops = self._tables[index]
        started = time.monotonic()
        try:
            hidden = model.forward(token_ids, batch, self._caches[index])
            for first in range(0, len(ids), step):
                logits = model.logits(hidden[first : first + step])
                if len(ids) == len(entries) <= step:
                    self._times[index].add(len(ids), time.monotonic() - started)
                part = following[first : first + step]
                found += token_logprobs(logits, part, [num_top] * len(part))
        finally:
            model.ops = live
        return found

    def _block_table(self, place: int) -> list[int]:
        """Every second one backwards: kernels may treat consecutive blocks in a way of their own."""
        blocks = list(range(place * self._blocks_each, (place + 1) * self._blocks_each))
        return blocks[::-1] if place % 2 else blocks


def _tokens(packed: bytes, vocab_size: int) -> array[int]:
    tokens = array("I")
    if len(packed) % 4 or not 8 <= len(packed) <= 4 * MAX_TOKENS:
        raise InvalidRequestError(f"2 to {MAX_TOKENS} tokens of 4 bytes can be scored", param="sequences")
    tokens.frombytes(packed)
    if max(tokens) >= vocab_size:
        raise InvalidRequestError(f"token ids must be below {vocab_size}", param="sequences")
    return tokens
