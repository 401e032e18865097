"""How much memory there is, and how many blocks of KV cache it gives.

available at start │ weights │ KV cache: at most half of the rest by default │ activations, others │
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.core.errors import InsufficientMemoryError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.launch import MachineShare
from headrace.core.machine import available_memory

GIB = 1024**3
# In main memory the default KV cache never takes more than this, unless one request needs it.
DEFAULT_KV_CAP_BYTES = 4 * GIB
# One request of maximum length may take so much of what is free; on a card, which has no other use, so
# may the cache by default.
_LARGEST_SHARE = 0.9


def available_bytes(device: torch.device, share: MachineShare) -> int:
    """Memory that this process could still take, within its share; on CUDA the card's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, total // share.num_replicas)
    free = available_memory()
    return min(free, share.memory_bytes) if share.memory_bytes else free


def resolve_max_model_len(asked: int | None, limit: int) -> int:
    """The longest sequence: what was asked, at most what the model was made for."""
    if asked is None:
        return limit
    if asked > limit:
        raise UsageError(
            f"--max-model-len {asked} is more than the {limit} positions this model was made for",
            hint=f"use --max-model-len {limit} or less",
            param="--max-model-len",
        )
    return asked


@dataclass(frozen=True)
class KVSize:
    """``reason`` says how the number was chosen, for the start-up lines."""

    num_blocks: int
    nbytes: int
    reason: str


def size_kv_cache(
    config: EngineConfig,
    max_model_len: int,
    bytes_per_block: int,
    free_bytes: int,
    *,
    on_card: bool = False,
) -> KVSize:
    """How many blocks to allocate with ``free_bytes`` left after the weights.

    Raises InsufficientMemoryError when one request of ``max_model_len`` tokens does not fit.
    """
    blocks_per_request = -(-max_model_len // config.block_size)
    one_request = blocks_per_request * bytes_per_block
    if config.kv_cache_gib is not None:
        budget, source = int(config.kv_cache_gib * GIB), "--kv-cache-gib"
        if budget > free_bytes:
            raise InsufficientMemoryError(
                f"--kv-cache-gib asks for {config.kv_cache_gib:g} GiB and {free_bytes / GIB:.2f} GiB are "
                "left after the weights",
                hint=f"lower --kv-cache-gib below {free_bytes / GIB:.2f}",
                param="--kv-cache-gib",
            )
    else:
        share = int(free_bytes * _LARGEST_SHARE) if on_card else free_bytes // 2
        limits = {
            "max_num_seqs of max_model_len": config.max_num_seqs * one_request,
            "share of the free memory": share,
        }
        if not on_card:
            limits[f"the default limit of {DEFAULT_KV_CAP_BYTES // GIB} GiB"] = DEFAULT_KV_CAP_BYTES
        source = min(limits, key=lambda name: limits[name])
        budget = limits[source]
        if budget < one_request <= free_bytes * _LARGEST_SHARE:
            budget, source = one_request, "one request of max_model_len"
    if budget < one_request:
        raise InsufficientMemoryError(
            f"one request of {max_model_len} tokens needs {one_request / GIB:.3f} GiB of KV cache and "
            f"{max(budget, 0) / GIB:.3f} GiB are available for it",
            hint=_hint(config, max_model_len, one_request, budget, free_bytes),
            param="--max-model-len",
        )
    num_blocks = budget // bytes_per_block
    return KVSize(num_blocks, num_blocks * bytes_per_block, source)


def _hint(config: EngineConfig, max_model_len: int, one_request: int, budget: int, free_bytes: int) -> str:
    fitting = int(max_model_len * max(budget, 0) / one_request) // config.block_size * config.block_size
    lower = f"lower --max-model-len to {fitting} or less" if fitting else "lower --max-model-len"
    if config.kv_cache_gib is not None and one_request <= free_bytes * _LARGEST_SHARE:
        return f"{lower}, or raise --kv-cache-gib to {one_request / GIB:.3f}"
    return f"{lower}, or free memory"
