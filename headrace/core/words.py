"""Numbers with their nouns, and what ended a process, as people say them."""

from __future__ import annotations

import signal


def count(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_exit(code: int) -> str:
    """A process's exit status, as ``subprocess`` gives it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
