"""Many different streams at once through HTTP, what they got, and whether two runs got the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATIENCE_S = 120
# The same numbers, computed in other batches: float32 keeps about seven digits.
LOGPROB_TOLERANCE = 2e-4


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Stream:
    """One streamed request and what came of it."""

    path: str
    body: dict[str, Any]
    request_id: str = ""
    wants_receipt: bool = False
    receipt: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    num_events: int = 0
    done: bool = False
    failure: str = ""

    def again(self) -> Stream:
        """The same request, not yet sent."""
        return Stream(self.path, self.body)

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.failure = json.dumps(event)
            return
        self.usage = event.get("usage") or self.usage
        self.receipt = event.get("receipt") or self.receipt
        for each in event["choices"]:
            choice = self.choices.setdefault(each["index"], Choice())
            assert choice.finish_reason is None, "an event after the end"
            choice.text += each["delta"].get("content") or "" if "delta" in each else each["text"]
            choice.finish_reason = each["finish_reason"]
            choice.stop_reason = each.get("stop_reason")
            _take_logprobs(choice, each.get("logprobs") or {})
        self.num_events += 1


def _take_logprobs(choice: Choice, found: dict[str, Any]) -> None:
    if "tokens" in found:  # a completion's
        choice.tokens += found["tokens"]
        choice.logprobs += found["token_logprobs"]
        choice.top += found["top_logprobs"] or []
    for entry in found.get("content") or []:  # a chat's
        choice.tokens.append(repr(entry["bytes"]))
        choice.logprobs.append(entry["logprob"])
        choice.top.append({repr(best["bytes"]): best["logprob"] for best in entry["top_logprobs"]})


async def _run_one(session: aiohttp.ClientSession, url: str, stream: Stream) -> None:
    body = {**stream.body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"x-request-id": stream.request_id} if stream.request_id else {}
    if stream.wants_receipt:
        headers["x-headrace-receipt"] = "1"
    async with session.post(url + stream.path, json=body, headers=headers) as response:
        if response.status != 200:
            stream.failure = f"{response.status}: {await response.text()}"
            return
        async for line in response.content:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                stream.done = True
            elif data:
                stream.take(json.loads(data))


async def _run_all(
    url: str,
    streams: list[Stream],
    meanwhile: Callable[[], Awaitable[None]] | None,
    again_while: Callable[[], bool],
) -> None:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)

    async def lane(stream: Stream) -> None:
        await _run_one(session, url, stream)
        while again_while():
            stream = stream.again()
            streams.append(stream)
            await _run_one(session, url, stream)

    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        for stream in list(streams):
            group.create_task(lane(stream))
        if meanwhile is not None:
            group.create_task(meanwhile())


def run(
    url: str,
    streams: Sequence[Stream],
    meanwhile: Callable[[], Awaitable[None]] | None = None,
    *,
    again_while: Callable[[], bool] = lambda: False,
) -> list[Stream]:
    """Sends all at once and reads them to their ends, while ``meanwhile`` does its worst.

    Each that ends is sent again while ``again_while`` holds. Returns all that were sent, the given first.
    """
    sent = list(streams)
    asyncio.run(_run_all(url, sent, meanwhile, again_while))
    return sent


async def until(condition: Callable[[], bool], what: str) -> None:
    """Lets the streams flow until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def check_complete(streams: Sequence[Stream]) -> None:
    """Every stream ended as it should, with its usage."""
    failed = [f"{stream.body}: {stream.failure}" for stream in streams if stream.failure]
    assert not failed, f"{len(failed)} of {len(streams)} failed, such as {failed[0]}"
    for stream in streams:
        assert stream.done, f"no end: {stream.body}"
        assert len(stream.choices) == stream.body.get("n", 1)
        for choice in stream.choices.values():
            assert choice.finish_reason in ("stop", "length"), stream.body
        assert stream.usage["completion_tokens"] > 0


def check_same(streams: Sequence[Stream], reference: Sequence[Stream]) -> None:
    """Text, tokens, reasons and usage are equal, log-probabilities up to rounding."""
    for stream, wanted in zip(streams, reference, strict=True):
        assert stream.body == wanted.body
        for index, choice in stream.choices.items():
            other = wanted.choices[index]
            assert choice.tokens == other.tokens, f"{stream.body}: {_difference(choice, other)}"
            assert choice.text == other.text, stream.body
            assert (choice.finish_reason, choice.stop_reason) == (other.finish_reason, other.stop_reason)
            pairs = list(zip(choice.logprobs, other.logprobs, strict=True))
            assert all(abs(one - two) < LOGPROB_TOLERANCE for one, two in pairs), stream.body
        for name in ("prompt_tokens", "completion_tokens"):
            assert stream.usage[name] == wanted.usage[name], stream.body


def _difference(choice: Choice, other: Choice) -> str:
    """Where the tokens part, and how sure the model was there."""
    pairs = enumerate(zip(choice.tokens, other.tokens, strict=False))
    first = next((i for i, (one, two) in pairs if one != two), None)
    if first is None:
        return f"{len(choice.tokens)} tokens, not {len(other.tokens)}"
    found = f"{choice.tokens[first]}, not {other.tokens[first]}"
    return f"at {first} of {len(other.tokens)}: {found}; {other.top[first : first + 1]}"


def check_same_up_to_noise(streams: Sequence[Stream], reference: Sequence[Stream], floor: float) -> int:
    """Greedy streams with log-probabilities: where one first differs from its reference, the two best
    candidates were closer than the noise floor allows to tell apart. Returns how many are equal."""
    num_equal = 0
    for stream, wanted in zip(streams, reference, strict=True):
        ours, theirs = stream.choices[0], wanted.choices[0]
        pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if first is None:
            num_equal += 1
            continue
        # tokens that are not text by themselves all look alike: they may have parted at one of these
        alike = [i for i in range(first) if theirs.tokens[i] in ("", "\ufffd")]
        gaps = {i: _gap(theirs.top[i]) for i in (*alike, first)}
        assert min(gaps.values()) <= 2 * floor, f"differs at {first}, gap {gaps[first]}, floor {floor}"
    return num_equal


def _gap(top: dict[str, float]) -> float:
    """Between the two best candidates; 0 for two that look alike."""
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


# In float32 a draw is exact unless it falls within rounding, about 1e-6, of the border between two tokens.
# Among four tokens there are few borders, and with these seeds no draw of the tests comes closer to one
# than 1.6e-5.
FIRST_SEED = 12_000
TOP_K = 4


def many_streams(count: int, length: int) -> list[Stream]:
    """Greedy and seeded, alone and in pairs, with penalties and log-probabilities, chats and completions."""
    streams = []
    for i in range(count):
        prompt = f"{'one two three ' * (i % 5)}request {i}: the capital"
        body: dict[str, Any] = {"max_tokens": length, "ignore_eos": True}
        kind = i % 8
        path = CHAT if kind in (2, 5) else TEXT
        if kind in (1, 2, 3, 4):
            body |= {"seed": FIRST_SEED + i, "top_k": TOP_K}
        if kind == 1:
            body |= {"temperature": 0.9, "top_p": 0.95}
        elif kind == 2:
            body |= {"temperature": 0.8, "logprobs": True, "top_logprobs": 2}
        elif kind == 3:
            body |= {"temperature": 1.1, "n": 2, "logprobs": 1}
        elif kind == 4:
            body |= {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4}
        elif kind == 5:
            body |= {"temperature": 0, "repetition_penalty": 1.2}
        elif kind == 6:
            body |= {"temperature": 0, "logprobs": 2}
        else:
            body |= {"temperature": 0}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        streams.append(Stream(path, body))
    return streams


def with_stops(reference: Sequence[Stream]) -> list[Stream]:
    """The same requests with a stop string each, which lies late in what they answered without."""
    stopped = []
    for stream in reference:
        text = stream.choices[0].text
        stopped.append(Stream(stream.path, {**stream.body, "stop": [text[-len(text) // 4 :][:4]]}))
    return stopped
