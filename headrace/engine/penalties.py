"""Which tokens a sequence has seen, and how often it produced each: what the penalties need.

ids     every distinct token of prompt and output, in order of first appearance
counts  beside each id, how often it occurs in the output (0: only in the prompt)
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

_FIRST_ROOM = 64


class TokenCounts:
    """Grows with one sequence, at a cost of one dictionary access a token."""

    def __init__(self, tokens: array[int], num_prompt_tokens: int) -> None:
        prompt = np.frombuffer(tokens, dtype=np.uint32)[:num_prompt_tokens]
        known = np.unique(prompt).astype(np.int64)
        self._index = {int(token): i for i, token in enumerate(known)}
        self._size = len(known)
        self._ids = np.zeros(self._size + _FIRST_ROOM, dtype=np.int64)
        self._ids[: self._size] = known
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_seen = num_prompt_tokens

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._size]

    def catch_up(self, tokens: array[int]) -> None:
        """Counts the output tokens that were added since the last call."""
        for position in range(self._num_seen, len(tokens)):
            token = tokens[position]
            index = self._index.get(token)
            if index is None:
                index = self._append(token)
            self._counts[index] += 1.0
        self._num_seen = len(tokens)

    def _append(self, token: int) -> int:
        index = self._size
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        self._index[token] = index
        self._size += 1
        return index
