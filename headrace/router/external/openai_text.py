"""Any other server that speaks OpenAI's API, a hosted one included: bodies pass through as text."""

from __future__ import annotations

LIMITS = [
    "text only: the server's own tokenizer, chat template and defaults apply",
    "a broken stream is reported, not continued elsewhere",
    "no cache events, no load: what it holds and how busy it is are guesses from what was sent",
]
