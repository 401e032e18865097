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
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
# Cuts are looked for among so many best tokens, then among all: a sort of the vocabulary is dear.
_CANDIDATES = (64, 1024)
# A row is summed in runs of so many columns: running sums of 262,144 tokens would fill 2 MB.
_RUN = 128
# On a CPU so many numbers are worked on at a time: what does not fit the caches comes from fresh pages too.
_DRAWN_ELEMENTS = 1 << 19


@dataclass
class SampledBatch:
    """One token a row. ``invalid`` lists rows without any finite logit to draw from; their token is 0.

    ``invalid_prompts`` sampled nothing, and what was computed for them is not finite.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    invalid: list[int] = field(default_factory=list)
    invalid_prompts: list[Sequence] = field(default_factory=list)

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
            batch = self._sample_edited(logits, rows, sequences)
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
        """Samples rows of ``values`` (rows, vocab)."""
        if not all(row.draws_only for row in rows):
            values = values.clone()
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
    """What one sequence's sampling parameters come to, and what the engine keeps for it between steps."""

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
        self.blocks: array[int] = array("q")  # a long block table, as of ``num_preemptions``
        self.num_preemptions = 0
        bias = params.logit_bias or {}
        self.bias_ids = np.array(list(bias.keys()), dtype=np.int64)
        self.bias_values = np.array(list(bias.values()), dtype=np.float32)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.end_ids = np.array(sorted(ends) if params.min_tokens else [], dtype=np.int64)
        self.draws_only = not bias and not self.has_penalty and not params.min_tokens
        self.is_plain = self.is_greedy and self.draws_only

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
        best = array.argmax(axis=-1).tolist()
        return SampledBatch(
            best, invalid=[i for i, token in enumerate(best) if not array[i, token] > -math.inf]
        )
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
    """Draws one token a row from logits (rows, vocab); ``uniforms`` are in [0, 1)."""
    step = len(params)
    if values.device.type == "cpu":
        step = max(1, _DRAWN_ELEMENTS // values.shape[1])
    batch = SampledBatch([])
    for start in range(0, len(params), step):
        some = slice(start, start + step)
        batch.extend(_draw(values[some], params[some], uniforms[some]))
    return batch


def _draw(values: Tensor, params: list[SamplingParams], uniforms: list[float]) -> SampledBatch:
    values = values / _column(values, [p.temperature for p in params])
    if any(p.min_p > 0 for p in params):
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        floor = values.amax(dim=-1, keepdim=True) + _column(values, log_min_p)
        values.masked_fill_(values < floor, -math.inf)
    probs = values.softmax(dim=-1)
    vocab = values.shape[1]
    cuts = [_Cut(p.top_k if 0 < p.top_k < vocab else vocab, p.top_p) for p in params]
    batch = SampledBatch([0] * len(params))
    truncated = [i for i, cut in enumerate(cuts) if cut.top_p < 1 or cut.top_k < vocab]
    for size in _CANDIDATES:
        if truncated and size < vocab:
            truncated = _draw_from_best(size, truncated, values, probs, cuts, uniforms, batch)
    for i in truncated:
        probs[i].masked_fill_(values[i] < _threshold(values[i], probs[i], cuts[i]), 0.0)
    decided = {i for i, cut in enumerate(cuts) if cut.top_p < 1 or cut.top_k < vocab} - set(truncated)
    rest = [i for i in range(len(params)) if i not in decided]
    if rest:
        chosen = probs if len(rest) == len(params) else probs[torch.tensor(rest, device=probs.device)]
        picked = _pick(chosen, [uniforms[i] for i in rest]).tolist()
        for i, token in zip(rest, picked, strict=True):
            batch.token_ids[i] = max(token, 0)
            if token < 0:
                batch.invalid.append(i)
    return batch


class _Cut(NamedTuple):
    """Where one row is truncated; ``top_k`` of the vocabulary's size and ``top_p`` 1 cut nothing."""

    top_k: int
    top_p: float


def _draw_from_best(
    size: int,
    rows: list[int],
    values: Tensor,
    probs: Tensor,
    cuts: list[_Cut],
    uniforms: list[float],
    batch: SampledBatch,
) -> list[int]:
    """Draws for those of ``rows`` whose every token that may be drawn is among the ``size`` most likely;
    returns the others."""
    if len(rows) < len(cuts):
        index = torch.tensor(rows, device=values.device)
        values, probs = values[index], probs[index]
    vocab = values.shape[1]
    best, ids = values.topk(size, dim=-1)
    best_probs = probs.gather(-1, ids)
    threshold = _thresholds(best, best_probs, [cuts[i] for i in rows], vocab)
    # Otherwise tokens that we do not see may tie with the last one that stays in.
    certain = (best[:, -1] < threshold).tolist()
    by_id = ids.argsort(dim=-1)
    kept = best_probs.masked_fill(best < threshold.unsqueeze(1), 0.0).gather(-1, by_id)
    place = _pick(kept, [uniforms[i] for i in rows]).clamp_(min=0).unsqueeze(1)
    tokens = ids.gather(-1, by_id.gather(-1, place)).flatten().tolist()
    for i, token, is_certain in zip(rows, tokens, certain, strict=True):
        if is_certain:
            batch.token_ids[i] = token
    return [i for i, is_certain in zip(rows, certain, strict=True) if not is_certain]


def _thresholds(best: Tensor, probs: Tensor, cuts: list[_Cut], vocab: int) -> Tensor:
    """The smallest logit that stays in after top_k and then top_p, (rows,), from descending logits and
    their probabilities (rows, size); -inf where the cut lies beyond them. What ties with it stays in."""
    size = best.shape[1]
    limited = torch.tensor([cut.top_k < vocab for cut in cuts], device=best.device).unsqueeze(1)
    last_k = torch.tensor([min(cut.top_k, size) - 1 for cut in cuts], device=best.device).unsqueeze(1)
    floor = best.gather(-1, last_k)  # (rows, 1): the k-th largest
    cdf = torch.where(best >= floor, probs, 0.0).cumsum(dim=-1, dtype=torch.float64)
    mass = _column(cdf, [cut.top_p for cut in cuts]) * torch.where(limited, cdf[:, -1:], 1.0)
    last = torch.searchsorted(cdf, mass)  # the first place where the mass is reached
    nucleus = best.gather(-1, last.clamp(max=size - 1))
    wants_p = torch.tensor([cut.top_p < 1 for cut in cuts], device=best.device).unsqueeze(1)
    threshold = torch.where(wants_p, torch.maximum(nucleus, floor), floor)
    beyond = torch.tensor([size < cut.top_k < vocab for cut in cuts], device=best.device).unsqueeze(1)
    beyond |= ~limited & (last >= size)
    return threshold.masked_fill(beyond, -math.inf).squeeze(1)


def _threshold(values: Tensor, probs: Tensor, cut: _Cut) -> Tensor:
    """The same for one row, (vocab,), from all its tokens that matter."""
    vocab = values.shape[0]
    # Tokens this unlikely have less than 1 - top_p together: the nucleus does without them.
    least = (1.0 - cut.top_p) / vocab if cut.top_k == vocab else 0.0
    likely = ~(probs < least)  # keeps a row of NaN whole
    return _thresholds(_descending(values[likely]), _descending(probs[likely]), [cut], vocab)[0]


def _pick(weights: Tensor, uniforms: list[float]) -> Tensor:
    """Inverts each row's cumulative distribution: (rows,) columns, -1 for a row without any weight.

    First that of the sums of runs of columns, then that of the columns of one run.
    """
    width = weights.shape[1]
    run = min(_RUN, width)
    whole = width // run * run
    # Summed in float64: over 262,144 tokens float32 would misplace single tokens by a percent.
    sums = weights[:, :whole].view(-1, whole // run, run).sum(-1, dtype=torch.float64)
    if whole < width:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), dim=1)
    cdf = sums.cumsum(dim=-1)
    total = cdf[:, -1:]
    point = torch.minimum(_column(cdf, uniforms) * total, torch.nextafter(total, torch.zeros_like(total)))
    first = torch.searchsorted(cdf, point, right=True).clamp_(max=cdf.shape[1] - 1)
    point -= (cdf - sums).gather(1, first)
    columns = first * run + torch.arange(run, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=width - 1)).masked_fill_(columns >= width, 0.0)
    place = torch.searchsorted(inside.cumsum(dim=-1, dtype=torch.float64), point, right=True)
    # In another order the run may sum to a little less than where the point lies.
    last = (inside > 0).mul(torch.arange(run, device=weights.device)).amax(dim=-1, keepdim=True)
    return (first * run + torch.minimum(place, last)).masked_fill_(~(total > 0), -1).squeeze(1)


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
