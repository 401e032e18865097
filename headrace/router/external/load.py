"""How busy a server says it is, in the words of our own replicas' Stats."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.messages import Stats
from headrace.core.routing import EngineKind
from headrace.router.external.http_client import HTTPClient
from headrace.router.external.prometheus import Samples
from headrace.router.external.recognise import Recognised


async def read_load(client: HTTPClient, found: Recognised) -> Stats | None:
    """What its pages say now; None when they say nothing. HTTPFailure when the server does not answer."""
    kind: EngineKind = found.capabilities.kind
    if kind == "openai":
        return None
    status, page = await client.fetch("GET", "/metrics")
    if kind == "tensorrt-llm":
        return _tensorrt_llm(page) if status == 200 else None
    samples = Samples(page if status == 200 else b"")
    if kind == "vllm" and "vllm:num_requests_running" in samples:
        return _vllm(samples, found.num_blocks)
    if kind == "sglang":
        if "sglang:num_running_reqs" in samples:
            return _sglang(samples, found.num_blocks)
        status, page = await client.fetch("GET", "/get_load")
        return _sglang_load(page) if status == 200 else None
    if kind == "llama-server":
        if "llamacpp:requests_processing" in samples:
            return _llama_server(samples)
        status, page = await client.fetch("GET", "/slots")
        return _llama_slots(page) if status == 200 else None
    return None


def _vllm(samples: Samples, num_blocks: int) -> Stats:
    prompt = int(samples.get("vllm:prompt_tokens_total"))
    queries = int(samples.get("vllm:prefix_cache_queries_total"))
    hits = int(samples.get("vllm:prefix_cache_hits_total"))
    usage = samples.get("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    return Stats(
        num_running=int(samples.get("vllm:num_requests_running")),
        num_waiting=int(samples.get("vllm:num_requests_waiting")),
        num_blocks=num_blocks,
        num_free_blocks=_free(num_blocks, usage),
        num_preemptions=int(samples.get("vllm:num_preemptions_total")),
        prefix_cache_queries=queries,
        prefix_cache_hits=hits,
        prompt_tokens=prompt,
        computed_prompt_tokens=max(0, prompt - hits),
        generation_tokens=int(samples.get("vllm:generation_tokens_total")),
    )


def _sglang(samples: Samples, num_blocks: int) -> Stats:
    prompt = int(samples.get("sglang:prompt_tokens_total"))
    cached = int(samples.get("sglang:cached_tokens_total"))
    return Stats(
        num_running=int(samples.get("sglang:num_running_reqs")),
        num_waiting=int(samples.get("sglang:num_queue_reqs")),
        num_blocks=num_blocks,
        num_free_blocks=_free(num_blocks, samples.get("sglang:token_usage")),
        prefix_cache_queries=prompt,
        prefix_cache_hits=cached,
        prompt_tokens=prompt,
        computed_prompt_tokens=max(0, prompt - cached),
        generation_tokens=int(samples.get("sglang:generation_tokens_total")),
    )


def _sglang_load(page: bytes) -> Stats | None:
    """``/get_load``: one entry a data-parallel rank, its number of requests including those that wait."""
    value = _decode(page)
    ranks = value if isinstance(value, list) else [value]
    if not all(isinstance(rank, dict) for rank in ranks):
        return None
    waiting = sum(_int(rank.get("num_waiting_reqs")) for rank in ranks)
    total = sum(_int(rank.get("num_reqs")) for rank in ranks)
    return Stats(num_running=max(0, total - waiting), num_waiting=waiting)


def _llama_server(samples: Samples) -> Stats:
    computed = int(samples.get("llamacpp:prompt_tokens_total"))
    cached = int(samples.get("llamacpp:prompt_tokens_cached_total"))
    return Stats(
        num_running=int(samples.get("llamacpp:requests_processing")),
        num_waiting=int(samples.get("llamacpp:requests_deferred")),
        prefix_cache_queries=computed + cached,
        prefix_cache_hits=cached,
        prompt_tokens=computed + cached,
        computed_prompt_tokens=computed,
        generation_tokens=int(samples.get("llamacpp:tokens_predicted_total")),
    )


def _llama_slots(page: bytes) -> Stats | None:
    slots = _decode(page)
    if not isinstance(slots, list):
        return None
    return Stats(num_running=sum(bool(slot.get("is_processing")) for slot in slots if isinstance(slot, dict)))


def _tensorrt_llm(page: bytes) -> Stats | None:
    """A list of iterations since the last look, newest last; empty while idle or not enabled."""
    iterations = _decode(page)
    if not isinstance(iterations, list) or not iterations or not isinstance(iterations[-1], dict):
        return None
    last = iterations[-1]
    cache = last.get("kvCacheStats")
    cache = cache if isinstance(cache, dict) else {}
    return Stats(
        num_running=_int(last.get("numActiveRequests")),
        num_waiting=_int(last.get("numQueuedRequests")),
        num_blocks=_int(cache.get("maxNumBlocks")),
        num_free_blocks=_int(cache.get("freeNumBlocks")),
    )


def _free(num_blocks: int, usage: float) -> int:
    return round(num_blocks * (1.0 - min(max(usage, 0.0), 1.0)))


def _decode(page: bytes) -> Any:
    try:
        return msgspec.json.decode(page)
    except msgspec.DecodeError:
        return None


def _int(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
