"""Small engines to test with, and Transformers to compare them with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.core.knobs import EngineConfig
from headrace.core.messages import Output, TokenLogprobs
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.engine import Engine
from headrace.engine.memory import GIB


def make_engine(folder: Path, *, num_blocks: int | None = None, **knobs: Any) -> Engine:
    """An engine on the CPU with short sequences and few tokens a step; ``num_blocks`` sizes the pool."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "kv_cache_gib": 0.02,
    }
    engine = Engine(EngineConfig(**{**defaults, **knobs}), folder)
    if num_blocks is None:
        return engine
    block_bytes = engine.kv_size.nbytes / engine.kv_size.num_blocks
    return make_engine(folder, **{**knobs, "kv_cache_gib": (num_blocks + 0.5) * block_bytes / GIB})


def make_request(request_id: str, prompt: list[int], **params: Any) -> Request:
    """Greedy, 10 tokens, blind to end-of-text unless ``params`` say otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, **params})
    return Request(request_id=request_id, prompt=pack_tokens(prompt), sampling=sampling)


@dataclass
class Result:
    """Everything one sample of a request got."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, output: Output) -> None:
        assert self.finish_reason is None, "output after the end"
        self.tokens += output.token_ids
        self.finish_reason, self.stop_token = output.finish_reason, output.stop_token
        self.num_cached_tokens = output.num_cached_tokens
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt log-probabilities came twice"
            self.prompt_logprobs = output.prompt_logprobs


def run(engine: Engine, requests: list[Request], *, stagger: int = 0) -> dict[tuple[str, int], Result]:
    """Runs requests to their end, one more every ``stagger`` steps; checks that no block is lost."""
    results: dict[tuple[str, int], Result] = {}
    waiting = list(requests)
    num_steps = 0
    while waiting or engine.has_work:
        while waiting and (stagger == 0 or num_steps % stagger == 0):
            engine.add(waiting.pop(0))
            if stagger:
                break
        step = engine.step()
        assert step.failed == []
        for output in step.outputs:
            results.setdefault((output.request_id, output.sample_index), Result()).take(output)
        engine.check_integrity()
        num_steps += 1
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks
    assert all(result.finish_reason is not None for result in results.values())
    return results


def run_tokens(engine: Engine, requests: list[Request], *, stagger: int = 0) -> list[list[int]]:
    """Tokens of each request's first sample, in order."""
    results = run(engine, requests, stagger=stagger)
    return [results[request.request_id, 0].tokens for request in requests]


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """``count`` greedy tokens from Transformers."""
    with torch.inference_mode():
        tokens = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    generated: list[int] = tokens[0, len(prompt) :].tolist()
    return generated


def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocab) log-probabilities that Transformers gives after each token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].double()
    return logits.log_softmax(-1)
