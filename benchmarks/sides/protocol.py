"""What the bench and a side's process say to each other. Standard library (and numpy, which every side has).

    bench ──► side (a JSON line on stdin)         side ──► bench (a JSON line on stdout)
                                                  {"event": "ready", "weights_seconds": …, "notes": …}
    {"op": "prefill", "prompts": [[ids…]]}        {"seconds": …}                 first token of all
    {"op": "decode", "prompts": …, "tokens": n}   {"tokens": …, "seconds": …}    after all had one
    {"op": "logits", "tokens": […], "file": …}    {"rows": n}                    a .npy of (tokens, vocab)
    EOF                                           exits

One step-by-step timeline serves both: prefill is from the first prompt's hand-in until every sequence has
its first token; decode counts only the tokens that come after that moment, over the time they take.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Side(Protocol):
    """An engine that was loaded; ``weights_seconds`` is its loading of the weights alone."""

    weights_seconds: float | None
    notes: str

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timeline: ...

    def logits(self, tokens: list[int]) -> Any:
        """(tokens, vocab): logits, or log-probabilities, of what follows each token."""


def matrix(rows: list[list[int]], dtype: str) -> Any:
    """(rows, columns) as numpy."""
    import numpy

    return numpy.array(rows, dtype=dtype)


class Timeline:
    """When each sequence had how many tokens; times in seconds of ``perf_counter``."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.start = time.perf_counter()
        self.counts: dict[str, int] = {}
        self.all_started: float | None = None
        self.tokens_at_start = 0
        self.end = self.start

    def record(self, key: str, num_tokens: int) -> None:
        """Sequence ``key`` now has ``num_tokens`` tokens."""
        self.counts[key] = num_tokens

    def stamp(self) -> None:
        """Everything recorded since the last call came out of one step that ends now."""
        self.end = time.perf_counter()
        if self.all_started is None and sum(n > 0 for n in self.counts.values()) == self.num_sequences:
            self.all_started = self.end
            self.tokens_at_start = sum(self.counts.values())

    def prefill(self) -> dict[str, float]:
        """Seconds until every sequence had its first token."""
        if self.all_started is None:
            raise RuntimeError(f"only {len(self.counts)} of {self.num_sequences} sequences gave a token")
        return {"seconds": self.all_started - self.start}

    def decode(self) -> dict[str, float]:
        """Tokens after every sequence had its first one, and the seconds they took."""
        self.prefill()
        assert self.all_started is not None
        tokens = sum(self.counts.values()) - self.tokens_at_start
        return {"tokens": tokens, "seconds": self.end - self.all_started}


def answers() -> Any:
    """A writer for answers; afterwards whatever else prints to stdout goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(make: Callable[[list[str]], Side]) -> None:
    """Loads the side that ``make`` builds from the command line, then answers until EOF."""
    channel = answers()

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    try:
        side = make(sys.argv[1:])
    except Exception as error:
        say({"event": "error", "message": f"{type(error).__name__}: {error}"})
        raise
    say({"event": "ready", "weights_seconds": side.weights_seconds, "notes": side.notes})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["op"] == "logits":
                answer = _write(side.logits(command["tokens"]), command["file"])
            elif command["op"] == "prefill":
                answer = side.run(command["prompts"], 1).prefill()
            else:
                answer = side.run(command["prompts"], command["tokens"] + 1).decode()
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
        say(answer)


def _write(logits: Any, file: str) -> dict[str, Any]:
    import numpy

    rows = numpy.asarray(logits, dtype=numpy.float32)
    numpy.save(file, rows)
    return {"rows": len(rows)}
