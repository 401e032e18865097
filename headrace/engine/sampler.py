"""From logits to tokens.

    greedy rows without any edit ── arg max, nothing else
    all other rows, in vLLM's order:
        bias, min_tokens mask ─► penalties ─► (greedy: arg max)
                                          └─► temperature ─► min_p ─► top_k ─► top_p ─► draw

What a row gets depends on that row alone: no path is chosen by what else is in the batch. Truncation is by
threshold (the k-th largest logit, the last logit inside the nucleus), so tied tokens stay or go together,
and the draw inverts the cumulative distribution in order of token ids: neither sees how a sort broke ties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.messages import TokenLogprobs
from headrace.core.request import SamplingParams
from headrace.engine.logprobs import PromptLogprobs, token_logprobs
from headrace.engine.penalties import TokenCounts
from headrace.engine.rng import UniformStream
from headrace.engine.sequence import Sequence

# Below this temperature a draw is an arg max in all but name, and the division would overflow.
GREEDY_TEMPERATURE = 1e-5
# Cuts are looked for among so many best tokens first, then among all.
_CANDIDATES = 1024


@dataclass
class SampledBatch:
    """One token a row. ``invalid`` lists rows without any finite logit to draw from; their token is 0."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    invalid: list[int] = field(default_factory=list)

    def extend(self, other: SampledBatch) -> None:
        """Appends another batch's rows."""
        offset = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs |= {offset + row: found for row, found in other.logprobs.items()}
        self.invalid += [offset + row for row in other.invalid]


class Sampler:
    """Draws the next token of each sequence."""

    def __init__(self, eos_token_ids: list[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> SampledBatch:
        """The next token of each sequence from logits of shape (rows, vocab), float32."""
        rows = [self.row(sequence) for sequence in sequences]
        edited = [i for i, row in enumerate(rows) if not row.is_plain]
        if len(edited) == len(rows):
            batch = self._sample_edited(logits.clone(), rows, sequences)
        else:
            batch = _greedy(logits)
            if edited:
                chosen = torch.tensor(edited, device=logits.device)
                part = self._sample_edited(
                    logits[chosen], [rows[i] for i in edited], [sequences[i] for i in edited]
                )
                plain_invalid = [i for i in batch.invalid if rows[i].is_plain]
                batch.invalid = plain_invalid + [edited[i] for i in part.invalid]
                for i, token in zip(edited, part.token_ids, strict=True):
                    batch.token_ids[i] = token
        wanting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if wanting:
            found = token_logprobs(
                logits[torch.tensor(wanting, device=logits.device)],
                [batch.token_ids[i] for i in wanting],
                [rows[i].params.logprobs or 0 for i in wanting],
            )
            batch.logprobs = dict(zip(wanting, found, strict=True))
        return batch

    def row(self, sequence: Sequence) -> SamplingRow:
        """What is kept for a sequence, made when it is first seen; all of it can be made again."""
        row = sequence.runner_state
        if row is None:
            row = sequence.runner_state = SamplingRow(sequence, self._eos_token_ids)
        assert isinstance(row, SamplingRow)
        return row

    def _sample_edited(
        self, values: Tensor, rows: list[SamplingRow], sequences: list[Sequence]
    ) -> SampledBatch:
        """Samples rows of ``values`` (rows, vocab), which it overwrites."""
        _add_bias(values, rows, sequences)
        _add_penalties(values, rows, sequences)
        greedy = [i for i, row in enumerate(rows) if row.is_greedy]
        if len(greedy) == len(rows):
            return _greedy(values)
        drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
        uniform = [rows[i].uniforms.at(sequences[i].num_output_tokens) for i in drawn]
        parameters = [rows[i].params for i in drawn]
        if not greedy:
            return draw(values, parameters, uniform)
        batch = _greedy(values)
        part = draw(values[torch.tensor(drawn, device=values.device)], parameters, uniform)
        for i, token in zip(drawn, part.token_ids, strict=True):
            batch.token_ids[i] = token
        batch.invalid = [i for i in batch.invalid if rows[i].is_greedy] + [drawn[i] for i in part.invalid]
        return batch


class SamplingRow:
    """What one sequence's sampling parameters come to, and what is gathered for it on the way."""

    def __init__(self, sequence: Sequence, eos_token_ids: list[int]) -> None:
        params = self.params = sequence.sampling
        self.is_greedy = params.temperature < GREEDY_TEMPERATURE
        self.uniforms = UniformStream(params.seed or 0, sequence.sample_index)
        self.has_penalty = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.counts: TokenCounts | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        bias = params.logit_bias or {}
        self.bias_ids = np.array(list(bias.keys()), dtype=np.int64)
        self.bias_values = np.array(list(bias.values()), dtype=np.float32)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.end_ids = np.array(sorted(ends) if params.min_tokens else [], dtype=np.int64)
        self.is_plain = self.is_greedy and not bias and not self.has_penalty and not params.min_tokens

    def token_counts(self, sequence: Sequence) -> TokenCounts:
        if self.counts is None:
            self.counts = TokenCounts(sequence.tokens, sequence.num_prompt_tokens)
        self.counts.catch_up(sequence.tokens)
        return self.counts


def _greedy(values: Tensor) -> SampledBatch:
    """Arg max of each row; the first of equals. A row with NaN is invalid."""
    if values.device.type == "cpu":
        # numpy's arg max is ten times faster than torch's and, like it, stops at a NaN.
        array = values.numpy()
        best = array.argmax(axis=-1)
        peak = array[np.arange(len(best)), best]
        invalid = np.flatnonzero(~(peak > -np.inf)).tolist()
        return SampledBatch(best.tolist(), invalid=invalid)
    top, index = values.max(dim=-1)
    both = torch.stack([index.double(), (top > -math.inf).double()]).tolist()
    return SampledBatch(
        [int(i) for i in both[0]], invalid=[i for i, valid in enumerate(both[1]) if not valid]
    )


def _add_bias(values: Tensor, rows: list[SamplingRow], sequences: list[Sequence]) -> None:
    """Adds each row's logit bias and masks ending tokens that come before ``min_tokens``."""
    row_index: list[NDArray[np.int64]] = []
    token_ids: list[NDArray[np.int64]] = []
    amounts: list[NDArray[np.float32]] = []
    for i, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        if len(row.bias_ids):
            row_index.append(np.full(len(row.bias_ids), i))
            token_ids.append(row.bias_ids)
            amounts.append(row.bias_values)
        if len(row.end_ids) and sequence.num_output_tokens < row.params.min_tokens:
            row_index.append(np.full(len(row.end_ids), i))
            token_ids.append(row.end_ids)
            amounts.append(np.full(len(row.end_ids), -np.inf, dtype=np.float32))
    if row_index:
        where = (_to(values, np.concatenate(row_index)), _to(values, np.concatenate(token_ids)))
        values.index_put_(where, _to(values, np.concatenate(amounts)), accumulate=True)


def _add_penalties(values: Tensor, rows: list[SamplingRow], sequences: list[Sequence]) -> None:
    """Repetition penalty (Keskar et al., arXiv 1909.05858) over prompt and output; presence and frequency
    penalties as OpenAI defines them, over the output."""
    penalised = [i for i, row in enumerate(rows) if row.has_penalty]
    if not penalised:
        return
    counts = [rows[i].token_counts(sequences[i]) for i in penalised]
    sizes = [len(c.ids) for c in counts]

    def spread(name: str) -> Tensor:
        per_row = np.array([getattr(rows[i].params, name) for i in penalised], dtype=np.float32)
        return _to(values, np.repeat(per_row, sizes))

    row_index = _to(values, np.repeat(np.array(penalised), sizes))
    token_ids = _to(values, np.concatenate([c.ids for c in counts]))
    count = _to(values, np.concatenate([c.counts for c in counts]))
    logits = values[row_index, token_ids]
    repetition = spread("repetition_penalty")
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= spread("frequency_penalty") * count
    logits -= spread("presence_penalty") * (count > 0)
    values.index_put_((row_index, token_ids), logits)


def draw(values: Tensor, params: list[SamplingParams], uniforms: list[float]) -> SampledBatch:
    """Draws one token a row from logits (rows, vocab), which it overwrites; ``uniforms`` are in [0, 1)."""
    values /= _column(values, [p.temperature for p in params])
    if any(p.min_p > 0 for p in params):
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        floor = values.amax(dim=-1, keepdim=True) + _column(values, log_min_p)
        values.masked_fill_(values < floor, -math.inf)
    probs = values.softmax(dim=-1)
    truncated = [i for i, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < values.shape[1]]
    if truncated:
        threshold = torch.full((len(params),), -math.inf, device=values.device)
        some = [params[i] for i in truncated]
        if len(truncated) == len(params):
            threshold = _thresholds(values, probs, some)
        else:
            index = torch.tensor(truncated, device=values.device)
            threshold[index] = _thresholds(values[index], probs[index], some)
        probs.masked_fill_(values < threshold.unsqueeze(1), 0.0)
    # Summed in float64: over 262,144 tokens float32 would misplace single tokens by a percent.
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(_column(cdf, uniforms) * total, below_total)
    token_ids = torch.searchsorted(cdf, point, right=True)
    valid = total > 0
    both = torch.cat([token_ids.masked_fill(~valid, 0), valid.long()], dim=1).tolist()
    return SampledBatch(
        [token for token, _ in both], invalid=[i for i, (_, good) in enumerate(both) if not good]
    )


def _thresholds(values: Tensor, probs: Tensor, params: list[SamplingParams]) -> Tensor:
    """The smallest logit that top_k and then top_p leave in, per row: (rows,)."""
    vocab = values.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    top_p = [p.top_p for p in params]
    size = min(_CANDIDATES, vocab)
    best, index = values.topk(size, dim=-1)
    threshold, found = _cut(best, probs.gather(-1, index), top_k, top_p, vocab, is_all=size == vocab)
    for i in (~found).nonzero().flatten().tolist():
        # Tokens this unlikely have less than 1 - top_p together: the nucleus does without them.
        least = (1.0 - top_p[i]) / vocab if top_k[i] == vocab else 0.0
        likely = ~(probs[i] < least)  # keeps a row of NaN whole
        ordered = _descending(values[i][likely]), _descending(probs[i][likely])
        threshold[i] = _cut(*ordered, top_k[i : i + 1], top_p[i : i + 1], vocab, is_all=True)[0][0]
    return threshold


def _cut(
    best: Tensor, probs: Tensor, top_k: list[int], top_p: list[float], vocab: int, *, is_all: bool
) -> tuple[Tensor, Tensor]:
    """Thresholds (rows,) from descending logits and their probabilities (rows, size), and whether they
    are certain: unless ``is_all``, a cut may lie beyond what is seen. ``top_k`` of ``vocab`` is no limit."""
    size = best.shape[1]
    last_k = torch.tensor([min(k, size) - 1 for k in top_k], device=best.device).unsqueeze(1)
    limited = torch.tensor([k < vocab for k in top_k], device=best.device)
    wants_p = torch.tensor([p < 1 for p in top_p], device=best.device)
    floor = best.gather(-1, last_k)  # (rows, 1): the k-th largest; what ties with it stays in
    cdf = torch.where(best >= floor, probs, 0.0).cumsum(dim=-1, dtype=torch.float64)
    whole = torch.where(limited.unsqueeze(1), cdf[:, -1:], 1.0)
    mass = _column(cdf, top_p) * whole
    last = torch.searchsorted(cdf, mass).clamp_(max=size - 1)  # the first place where the mass is reached
    nucleus = best.gather(-1, last)
    threshold = torch.where(wants_p.unsqueeze(1), torch.maximum(nucleus, floor), floor).squeeze(1)
    if is_all:
        return threshold, torch.ones_like(limited)
    seen_k = torch.tensor([k <= size for k in top_k], device=best.device)
    ties_seen = best[:, -1] < floor.squeeze(1)
    reached = cdf[:, -1] >= mass.squeeze(1)
    return threshold, torch.where(limited, seen_k & (ties_seen | ~wants_p), reached)


def _descending(row: Tensor) -> Tensor:
    """The numbers of one row from large to small, (1, n)."""
    if row.device.type == "cpu":
        # numpy's vectorised sort is several times faster than torch's.
        return torch.from_numpy(np.sort(row.numpy())[::-1].copy()).unsqueeze(0)
    return row.sort(descending=True).values.unsqueeze(0)


def _column(like: Tensor, numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).unsqueeze(1)


def _to(like: Tensor, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(like.device)
