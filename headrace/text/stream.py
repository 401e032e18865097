"""One sample's tokens as text: detokenized, cut at a stop string, with log-probabilities aligned to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.messages import FinishReason, TokenLogprobs
from headrace.core.request import SamplingParams
from headrace.text.stop import NO_STOPS, Match, StopStrings
from headrace.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TopToken:
    """One of the likeliest tokens at a position."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float


@dataclass(slots=True)
class TokenText:
    """One position's token as the API shows it.

    ``token`` is its own text with U+FFFD for half characters, ``bytes`` the real thing; ``text_offset``
    counts the characters before it; ``rank`` 1 is the likeliest; ``top`` has the best first.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float | None
    rank: int | None
    text_offset: int
    top: list[TopToken]


@dataclass(slots=True)
class TextDelta:
    """What one push added.

    ``text`` may be empty while half a character or a possible stop string is held back. ``token_ids``
    count in usage; tokens after a stop string's completion do not. ``stop_reason`` is the stop string or
    the stop token's id. ``needs_abort``: the engine still runs and should be told. ``logprobs`` has the
    tokens whose text is now out, None if none were asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    needs_abort: bool = False
    logprobs: list[TokenText] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens counted by this push."""
        return len(self.token_ids)


class TextStream:
    """Text of one sample. Not thread-safe. ``text_offset``: characters of the prompt, where it is echoed.

    ``transparent``: nothing is held back, looked for or aligned now. As long as it is true, tokens whose
    text is whole (``Tokenizer.whole_text``) may be shown as they are, without being pushed; ``text`` and
    ``token_ids`` then lack them.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, text_offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._offset = text_offset
        self._stops = StopStrings(params.stop) if params.stop else NO_STOPS
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, continuation=True
        )
        # text = shown parts + tail; a stop string never begins before the tail, because beginnings are held.
        self._shown: list[str] = []
        self._num_shown = 0
        self._tail = ""
        self._pending: list[TokenText] = []
        self._wants_logprobs = params.logprobs is not None
        self._is_plain = not self._stops and not self._wants_logprobs
        self.transparent = self._is_plain and self._detokenizer.idle
        self.token_ids: list[int] = []
        self.finished = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._shown)

    @property
    def num_tokens(self) -> int:
        """All tokens counted so far."""
        return len(self.token_ids)

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_token: int | None = None,
    ) -> TextDelta:
        """Takes one Output's fields; gives what can be shown now. Empty once finished."""
        delta = TextDelta(logprobs=[] if self._wants_logprobs else None)
        if self.finished:
            return delta
        shown = len(token_ids)
        if stop_token is not None and shown and token_ids[-1] == stop_token:
            # The token that ended it is counted, and shown only if asked for.
            shown -= 0 if self._params.include_stop_str_in_output else 1
        match = self._take(token_ids, shown, logprobs, delta)
        if match is None and finish_reason is not None:
            before = len(self._tail)
            self._tail += self._detokenizer.finish()
            if self._stops and self._may_stop() and len(self._tail) > before:
                match = self._stops.find(self._tail, before)
        if match is not None:
            kept = match.end if self._params.include_stop_str_in_output else match.start
            self._end(delta, "stop", match.value, kept)
            delta.needs_abort = finish_reason is None
        elif finish_reason is not None:
            self._end(delta, finish_reason, stop_token, len(self._tail))
        else:
            self._emit(delta, len(self._tail) - (self._stops.held(self._tail) if self._stops else 0))
            if self._is_plain:
                self.transparent = self._detokenizer.idle
        return delta

    def finish(self, reason: FinishReason = "abort") -> TextDelta:
        """Gives out what is held back, at an end that the engine did not announce."""
        return self.push([], None, reason)

    def _take(
        self,
        token_ids: Sequence[int],
        shown: int,
        logprobs: Sequence[TokenLogprobs] | None,
        delta: TextDelta,
    ) -> Match | None:
        """Appends tokens to the text; stops at the one that completes a stop string."""
        entries = logprobs if self._wants_logprobs and logprobs else None
        if entries is None and not self._stops:
            self._tail += self._detokenizer.push(token_ids[:shown])
            self._count(token_ids, delta)
            return None
        for index, token_id in enumerate(token_ids):
            before = len(self._tail)
            if index < shown:
                self._tail += self._detokenizer.push((token_id,))
            self._count((token_id,), delta)
            if entries is not None and index < min(shown, len(entries)):
                offset = self._offset + self._num_shown + before
                self._pending.append(_describe(self._tokenizer, token_id, entries[index], offset))
            if self._stops and len(self._tail) > before and self._may_stop():
                match = self._stops.find(self._tail, before)
                if match is not None:
                    return match
        return None

    def _count(self, token_ids: Sequence[int], delta: TextDelta) -> None:
        self.token_ids.extend(token_ids)
        delta.token_ids.extend(token_ids)

    def _may_stop(self) -> bool:
        return len(self.token_ids) > self._params.min_tokens

    def _end(self, delta: TextDelta, reason: FinishReason, stop: int | str | None, length: int) -> None:
        self._tail = self._tail[:length]
        self._emit(delta, length)
        if delta.logprobs is not None and self._pending:
            # Tokens without text at the very end are still the answer's, unless they were cut off.
            if not isinstance(stop, str):
                delta.logprobs += self._pending
            self._pending = []
        delta.finish_reason = reason
        delta.stop_reason = stop
        self.finished = True
        self.transparent = False

    def _emit(self, delta: TextDelta, length: int) -> None:
        delta.text = self._tail[:length]
        self._tail = self._tail[length:]
        if delta.text:
            self._shown.append(delta.text)
            self._num_shown += length
        if delta.logprobs is not None:
            end = self._offset + self._num_shown
            ready = 0
            while ready < len(self._pending) and self._pending[ready].text_offset < end:
                ready += 1
            delta.logprobs += self._pending[:ready]
            del self._pending[:ready]


def describe_prompt(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
) -> list[TokenText]:
    """A prompt's tokens with their log-probabilities; ``logprob`` None where nothing precedes the token."""
    described = []
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False, continuation=False)
    offset = 0
    for token_id, entry in zip(token_ids, entries, strict=True):
        described.append(_describe(tokenizer, token_id, entry, offset))
        offset += len(detokenizer.push((token_id,)))
    return described


def _describe(
    tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs | None, text_offset: int
) -> TokenText:
    token, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
    if entry is None:
        return TokenText(token_id, token, raw, None, None, text_offset, [])
    top = [
        TopToken(other, tokenizer.token_text(other), tokenizer.token_bytes(other), logprob)
        for other, logprob in entry.top
    ]
    return TokenText(token_id, token, raw, entry.logprob, entry.rank, text_offset, top)
