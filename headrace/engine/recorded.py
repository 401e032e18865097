"""What was served lately, to try kernels on: the beginnings of finished requests, in memory alone."""

from __future__ import annotations

from array import array
from collections import deque

_KEEP = 32
_LENGTH = 512
_SHORTEST = 16


class Recorded:
    """The first tokens, prompt and output, of the latest finished sequences."""

    def __init__(self) -> None:
        self._latest: deque[array[int]] = deque(maxlen=_KEEP)

    def add(self, tokens: array[int]) -> None:
        if len(tokens) >= _SHORTEST:
            self._latest.append(tokens[:_LENGTH])

    def sequences(self) -> list[bytes]:
        """As ``Request.prompt``, the latest first."""
        return [tokens.tobytes() for tokens in reversed(self._latest)]
