"""Log-probabilities of the model's own distribution: before bias, penalties and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.core.messages import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of logits (rows, vocab): its token's log-probability and rank, and the best ``num_top``.

    A rank is 1 plus the number of tokens that are strictly more likely.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    of_token = logprobs.gather(-1, chosen)  # (rows, 1)
    ranks = (logprobs > of_token).sum(dim=-1).add_(1).tolist()
    widest = min(max(num_top), logits.shape[1])
    if widest:
        top, top_ids = logprobs.topk(widest, dim=-1)
        pairs = [
            list(zip(ids, row, strict=True)) for ids, row in zip(top_ids.tolist(), top.tolist(), strict=True)
        ]
    else:
        pairs = [[] for _ in token_ids]
    return [
        TokenLogprobs(token, value, rank, best[:count])
        for token, value, rank, best, count in zip(
            token_ids, of_token.flatten().tolist(), ranks, pairs, num_top, strict=True
        )
    ]


class PromptLogprobs:
    """Gathers the log-probabilities of one prompt, chunk by chunk; entry 0 is None."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._entries: list[TokenLogprobs | None] = [None]

    @property
    def entries(self) -> list[TokenLogprobs | None]:
        return self._entries

    @property
    def num_positions(self) -> int:
        """Positions known so far, the first one included."""
        return len(self._entries)

    def add(self, logits: Tensor, next_tokens: list[int]) -> None:
        """Rows of logits (rows, vocab) for the next positions, and the prompt's tokens at them."""
        self._entries += token_logprobs(logits, next_tokens, [self._num_top] * len(next_tokens))
