"""A model behind any /v1/chat/completions writes the kernels; by default the deployment being optimised."""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.optimize.proposal import CandidateSource, ProposalError, Trial
from headrace.optimize.proposers.brief import (
    SOURCE,
    OpText,
    default_entry,
    facts,
    header,
    op_text,
    results,
    skeleton,
)
from headrace.optimize.records import Target

ATTEMPTS = 3
TEMPERATURE = 0.7
_PAUSE_S = 2.0
_MAX_BYTES = 8 << 20
_REPLY_CHARS = 20_000
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
_BLOCK = re.compile(r"```[^\S\n]*([\w+#-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CODE = {"", "c", "cc", "c++", "cpp", "cxx"}
_SYSTEM = (
    "You write fast CPU kernels in C++17. Answer with one complete source file in one ```cpp code block: "
    "no ellipses, nothing left out."
)
_AGAIN = (
    "That answer held no complete C++ source with hr_run. Answer with one ```cpp code block and nothing else."
)


class Endpoint:
    """Asks ``url`` (with or without /v1) for candidates, ``ATTEMPTS`` times each before it gives one up.

    ``model`` empty: the first that the endpoint lists. ``pause`` waits between tries.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        api_key: str = "",
        max_tokens: int = 3072,
        timeout_s: float = 900.0,
        describe: Callable[[Target], OpText] = op_text,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1") + "/v1"
        self._model, self._key = model, api_key
        self._max_tokens, self._timeout_s = max_tokens, timeout_s
        self._describe, self._pause = describe, pause

    @property
    def author(self) -> str:
        return f"endpoint:{self._model or self._base}"

    def propose(
        self, target: Target, best: Trial | None, history: Sequence[Trial], rng: random.Random
    ) -> CandidateSource | None:
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": prompt(target, self._describe(target), best, history)},
        ]
        last, reply, spent = "", "", Spent()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = self._ask(messages, rng.randrange(1 << 31), spent)
            except _Transient as error:
                last = str(error)
                if attempt < ATTEMPTS:
                    self._pause(_PAUSE_S * 2**attempt)
                continue
            source = find_source(reply)
            if source is not None:
                return CandidateSource(
                    files={SOURCE: source, "answer.md": reply},
                    entry=default_entry(target),
                    author=self._model or self.author,
                    note=f"attempt {attempt}; {spent}",
                )
            last = "the answer holds no C++ source with hr_run"
            messages = [
                *messages[:2],
                {"role": "assistant", "content": reply},
                {"role": "user", "content": _AGAIN},
            ]
        raise ProposalError(f"{ATTEMPTS} tries: {last} ({spent})", reply=reply[:_REPLY_CHARS])

    def _ask(self, messages: Sequence[Mapping[str, str]], seed: int, spent: Spent) -> str:
        if not self._model:
            listed = self._call("/models", None)
            try:
                self._model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise _Transient("the endpoint lists no model") from None
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": TEMPERATURE,
            "seed": seed,
        }
        began = time.monotonic()
        try:
            answer = self._call("/chat/completions", body)
        finally:
            spent.seconds += time.monotonic() - began
        spent.count(answer)
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise _Transient(f"an answer without a message: {json.dumps(answer)[:200]}") from None

    def _call(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Raises _Transient for what another try may mend, ProposalError for the rest."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._base + path, data=data, headers=headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                text = response.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            detail = error.read(2000).decode(errors="replace")
            error.close()
            words = f"the endpoint answered {error.code}: {' '.join(detail.split())[:300]}"
            if error.code in _RETRIED:
                raise _Transient(words) from None
            raise ProposalError(words, reply=detail) from None
        except ValueError as error:  # no URL
            raise ProposalError(f"{self._base}: {error}") from None
        except OSError as error:  # URLError, refused, reset, timed out
            raise _Transient(f"{self._base} cannot be reached: {error}") from None
        try:
            return json.loads(text)
        except ValueError:
            raise _Transient(f"no JSON: {text[:200].decode(errors='replace')}") from None


@dataclass
class Spent:
    """What the answers for one candidate cost."""

    prompt_tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0

    def count(self, answer: Any) -> None:
        """Adds the ``usage`` of an answer; not every endpoint tells it."""
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += int(usage.get("prompt_tokens") or 0)
            self.answer_tokens += int(usage.get("completion_tokens") or 0)

    def __str__(self) -> str:
        return f"{self.prompt_tokens} + {self.answer_tokens} tokens in {self.seconds:.0f} s"


class _Transient(Exception):
    """Another try may go better."""


def prompt(target: Target, text: OpText, best: Trial | None, history: Sequence[Trial]) -> str:
    """All that a model needs for one candidate, in one message."""
    parts = [
        "Write a faster kernel.",
        facts(target, text),
        f"## What it must compute\n\n```python\n{text.reference.strip()}\n```",
        f"## headrace_kernel.h\n\n```c\n{header().strip()}\n```",
        f"## Start from this\n\n```cpp\n{skeleton(target, text).strip()}\n```",
        results(best, history),
        "Sums in float32 or wider. The code runs in a sandbox: no files, no network, no threads but OpenMP's "
        "inside hr_run, no state between calls but the packed weights. It is checked on hidden shapes and "
        "inputs against a float64 reference.",
    ]
    return "\n\n".join(part for part in parts if part)


def find_source(reply: str) -> str | None:
    """The C++ of an answer: the longest code block with hr_run, or an answer that is bare code."""
    blocks = [match[2] for match in _BLOCK.finditer(reply) if match[1].lower() in _CODE]
    whole = [block for block in blocks if re.search(r"\bhr_run\s*\(", block)]
    if whole:
        return max(whole, key=len)
    is_bare = reply.lstrip().startswith(("#include", "extern", "//", "/*")) and "hr_run" in reply
    return reply if is_bare else None
