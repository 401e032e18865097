"""The workloads that the loop profiles, measures and canaries on, and one way to run them.

    decode    one answer of 128 tokens to a prompt of 128
    prefill   prompts of 512 tokens, one at a time, one token each
    chat      16 conversations behind one system prompt, 8 at once, prompts and answers of mixed length
    FILE      recorded requests, one JSON object a line:
              {"prompt": "text" or [token ids], "max_tokens": 64, "arrival_s": 0.25}

Greedy and blind to end-of-text, a workload computes the same number of tokens on any kernels; replayed with
the admissions of its first run, it goes through the same steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.bench.workload import token_prompt, token_prompts
from headrace.core.errors import UsageError
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.engine import Engine
from headrace.optimize.records import Phase

NAMES = ("decode", "prefill", "chat")
_DEFAULT_MAX_TOKENS = 64
_DECODE_TOKENS = 128
_PREFILL_TOKENS = 512
_NUM_PREFILLS = 4
_NUM_CHATS = 16
_CHATS_AT_ONCE = 8
_BLOCKED_S = 0.005


class WorkloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``prompt`` is token ids; ``arrival_s`` counts from the start of the run."""

    prompt: list[int]
    max_tokens: int
    arrival_s: float = 0.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of arrival, of which at most ``concurrency`` run at once (0: no limit)."""

    name: str
    requests: list[WorkloadRequest]
    concurrency: int = 0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(len(request.prompt) + request.max_tokens for request in self.requests)


class StepTime(msgspec.Struct, frozen=True):
    """One step of the engine: prompt tokens computed, tokens generated, and how long it took."""

    prompt_tokens: int
    output_tokens: int
    seconds: float

    @property
    def phase(self) -> Phase:
        return "prefill" if self.prompt_tokens else "decode"


@dataclass
class WorkloadRun:
    """``tokens`` are each request's; ``admissions`` the number of the step before which each was added.

    Rates are of the steps of one phase: tokens over the time of those steps.
    """

    wall_s: float = 0.0
    steps: list[StepTime] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    admissions: list[int] = field(default_factory=list)

    def phase_s(self, phase: Phase) -> float:
        """Seconds in steps of a phase."""
        return sum(step.seconds for step in self.steps if step.phase == phase)

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second of steps that only decode; 0 where there are none."""
        seconds = self.phase_s("decode")
        tokens = sum(step.output_tokens for step in self.steps if step.phase == "decode")
        return tokens / seconds if seconds else 0.0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second of steps that compute prompts."""
        seconds = self.phase_s("prefill")
        return sum(step.prompt_tokens for step in self.steps) / seconds if seconds else 0.0


def load_workload(
    name: str,
    vocab_size: int,
    *,
    max_len: int | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
    seed: int = 0,
) -> Workload:
    """The workload of a name or of a file.

    ``max_len`` shortens the built-in ones to what a model takes; ``encode`` turns a file's text into token
    ids. Raises UsageError for an unknown name, and with file and line for a record that cannot be read.
    """
    rng = random.Random(f"{name}/{seed}")
    limit = max_len or 1 << 30
    if name == "decode":
        count = min(_DECODE_TOKENS, limit // 2)
        request = WorkloadRequest(prompt=token_prompt(rng, count, vocab_size), max_tokens=count)
        return Workload(name=name, requests=[request], concurrency=1, seed=seed)
    if name == "prefill":
        prompts = token_prompts(rng, _NUM_PREFILLS, min(_PREFILL_TOKENS, limit - 1), vocab_size)
        requests = [WorkloadRequest(prompt=prompt, max_tokens=1) for prompt in prompts]
        return Workload(name=name, requests=requests, concurrency=1, seed=seed)
    if name == "chat":
        return Workload(
            name=name, requests=_chats(rng, vocab_size, limit), concurrency=_CHATS_AT_ONCE, seed=seed
        )
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(
            f"no workload {name!r}: neither a name nor a file",
            hint=f"names are {', '.join(NAMES)}; a file holds a JSON object a line: prompt, max_tokens",
            param="--workload",
        )
    return Workload(name=path.name, requests=_recorded(path, vocab_size, encode), seed=seed)


def run(
    engine: Engine,
    workload: Workload,
    *,
    admissions: Sequence[int] | None = None,
    after_step: Callable[[StepTime], None] | None = None,
) -> WorkloadRun:
    """Runs a workload on an idle engine (an LLM's is ``llm.engine``) from an empty prefix cache.

    Without ``admissions`` requests are added as they arrive; with those of an earlier run they are added
    before the same steps, whatever the clock says. A step is ``engine.step`` and the taking of its events.
    Raises what the engine says of a request that fails.
    """
    is_idle = not engine.has_work
    assert is_idle, "a workload needs an idle engine"
    engine.scheduler.reset_prefix_cache()
    requests = [_request(index, each) for index, each in enumerate(workload.requests)]
    done = WorkloadRun(tokens=[[] for _ in requests])
    limit = workload.concurrency or len(requests)
    counters = engine.scheduler.counters
    running = 0
    began = time.perf_counter()
    while len(done.admissions) < len(requests) or engine.has_work:
        while len(done.admissions) < len(requests) and running < limit:
            index = len(done.admissions)
            if admissions is not None:
                is_due = admissions[index] <= len(done.steps) or not engine.has_work
            else:
                is_due = workload.requests[index].arrival_s <= time.perf_counter() - began
            if not is_due:
                break
            engine.add(requests[index])
            done.admissions.append(len(done.steps))
            running += 1
        if not engine.has_work or engine.wait_s() != 0.0:
            time.sleep(_BLOCKED_S)  # until the next arrives, or for blocks from disk
            if not engine.has_work:
                continue
        prompt_tokens, output_tokens = counters.computed_prompt_tokens, counters.generation_tokens
        started = time.perf_counter()
        result = engine.step()
        engine.take_events()
        step = StepTime(
            counters.computed_prompt_tokens - prompt_tokens,
            counters.generation_tokens - output_tokens,
            time.perf_counter() - started,
        )
        for failed in result.failed:
            raise failed.to_error()
        if step.prompt_tokens or step.output_tokens:
            done.steps.append(step)
            if after_step is not None:
                after_step(step)
        for output in result.outputs:
            done.tokens[int(output.request_id)] += output.token_ids
            running -= output.finish_reason is not None
    done.wall_s = time.perf_counter() - began
    return done


def _request(index: int, request: WorkloadRequest) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
    return Request(request_id=str(index), prompt=pack_tokens(request.prompt), sampling=sampling)


def _chats(rng: random.Random, vocab_size: int, limit: int) -> list[WorkloadRequest]:
    """A shared system prompt of 64 tokens, questions of 32 to 448, answers of 32 to 96."""
    system = token_prompt(rng, min(64, limit // 4), vocab_size)
    requests = []
    for _ in range(_NUM_CHATS):
        max_tokens = min(rng.randrange(32, 97), limit // 4)
        length = min(rng.randrange(32, 449), limit - max_tokens - len(system))
        prompt = system + token_prompt(rng, length, vocab_size)
        requests.append(WorkloadRequest(prompt=prompt, max_tokens=max_tokens))
    return requests


class _Record(msgspec.Struct, frozen=True):
    """A line of a file of recorded requests; ``prompt_token_ids`` may stand for ``prompt``."""

    prompt: str | list[int] | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: int = _DEFAULT_MAX_TOKENS
    arrival_s: float = 0.0


def _recorded(
    path: Path, vocab_size: int, encode: Callable[[str], Sequence[int]] | None
) -> list[WorkloadRequest]:
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = msgspec.json.decode(line, type=_Record)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: {error}", param="--workload") from None
        prompt = record.prompt_token_ids if record.prompt is None else record.prompt
        if isinstance(prompt, str):
            if encode is None:
                raise UsageError(
                    f"{where}: text needs a tokenizer, and this model has none",
                    hint="record prompts as token ids",
                    param="--workload",
                )
            prompt = list(encode(prompt))
        if not prompt or record.max_tokens < 1 or record.arrival_s < 0:
            raise UsageError(
                f"{where}: needs a prompt of at least one token, max_tokens of at least 1 and arrival_s "
                "of at least 0",
                param="--workload",
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UsageError(
                f"{where}: token ids must be below the vocabulary's {vocab_size}", param="--workload"
            )
        requests.append(
            WorkloadRequest(prompt=prompt, max_tokens=record.max_tokens, arrival_s=record.arrival_s)
        )
    if not requests:
        raise UsageError(f"{path} holds no requests", param="--workload")
    return sorted(requests, key=lambda request: request.arrival_s)
