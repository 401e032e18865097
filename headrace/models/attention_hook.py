"""Our paged attention behind Transformers' attention interface.

    model.forward ─► its attention layer ─► paged_attention(module, q, k, v, …) ─► module.headrace.attend

Transformers keeps attention functions by name in a registry of its own; what is registered here has no
state. The step's batch and caches hang on the modules of one model, so two models never meet.

While a model is probed, a second name is used whose masks tell what they allow: the rule is read off the
mask function at positions far beyond the probe's length, so that a window of thousands of tokens is seen
without running thousands of tokens. In service no mask is made at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from headrace.core.errors import EngineError, UnsupportedModelError
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.kernels.weights import AttentionSpec

SERVE = "headrace"
PROBE = "headrace_probe"
_ATTRIBUTE = "headrace"
_RULE = "headrace_rule"

# what attention functions are told that changes nothing here: bookkeeping, or read below
_KNOWN = {
    "cache",
    "cache_position",
    "dropout",
    "is_causal",
    "layer_idx",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}


class Handler(Protocol):
    """Whoever answers a model's attention calls at the moment."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: dict[str, Any]
    ) -> Tensor: ...


class Hook:
    """One model's end of the registry: forwards attention calls to the current handler."""

    def __init__(self, model: nn.Module) -> None:
        self.handler: Handler | None = None
        for module in model.modules():
            setattr(module, _ATTRIBUTE, self)
        AttentionInterface.register(SERVE, paged_attention)
        AttentionInterface.register(PROBE, paged_attention)
        AttentionMaskInterface.register(PROBE, telling_mask)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extra: Any
) -> tuple[Tensor, None]:
    """query (1, heads, tokens, head_dim), key and value (1, kv heads, tokens, …) → (1, tokens, heads, v_dim).

    The signature is Transformers'.
    """
    hook: Hook | None = getattr(module, _ATTRIBUTE, None)
    if hook is None or hook.handler is None:
        raise EngineError(f"{type(module).__name__} called paged attention outside of a step")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (tokens, heads, dim)
    out = hook.handler.attend(module, q, k, v, attention_mask, extra)
    return out.view(1, q.shape[0], q.shape[1], v.shape[2]), None


@dataclass
class Serving:
    """Answers the calls of one forward pass, layer by layer in the order of the probe."""

    ops: OpTable
    specs: list[AttentionSpec]
    batch: AttentionBatch
    kv: list[LayerKV]
    calls: int = 0

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: dict[str, Any]
    ) -> Tensor:
        index = self.calls
        self.calls += 1
        if index >= len(self.specs):
            raise EngineError(f"attention was called more than {len(self.specs)} times in one pass")
        return self.ops.attention(
            q.contiguous(), k.contiguous(), v.contiguous(), self.kv[index], self.batch, self.specs[index]
        )


class Recording:
    """Answers the calls of the probe's first pass and writes down each layer's shape and rule."""

    def __init__(self, ops: OpTable, batch: AttentionBatch, dtype: torch.dtype) -> None:
        self.ops = ops
        self.batch = batch
        self.dtype = dtype
        self.specs: list[AttentionSpec] = []
        self.kv: list[LayerKV] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: dict[str, Any]
    ) -> Tensor:
        spec = read_spec(module, q, k, v, mask, extra)
        blocks = -(-q.shape[0] // self.batch.block_size) + 1
        cache = LayerKV.allocate(
            blocks,
            self.batch.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            self.dtype,
            q.device,
        )
        self.specs.append(spec)
        self.kv.append(cache)
        return self.ops.attention(q.contiguous(), k.contiguous(), v.contiguous(), cache, self.batch, spec)


def read_spec(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: dict[str, Any]
) -> AttentionSpec:
    """One layer's attention as the model asks for it.

    Raises UnsupportedModelError for what the paged attention cannot do.
    """
    name = type(module).__name__
    if k.shape[0] != q.shape[0]:
        raise UnsupportedModelError(
            f"{name} attends to {k.shape[0]} keys with {q.shape[0]} queries: cross-attention is not served"
        )
    unknown = sorted(key for key, value in extra.items() if key not in _KNOWN and value is not None)
    if unknown:
        raise UnsupportedModelError(f"{name} hands its attention {', '.join(unknown)}, not known here")
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal")
    window = extra.get("sliding_window")
    if mask is not None:
        rule: MaskRule | None = getattr(mask, _RULE, None)
        if rule is None:
            raise UnsupportedModelError(f"{name} makes its own attention mask or bias (as ALiBi does)")
        if not rule.is_understood:
            raise UnsupportedModelError(f"{name} uses a mask that is neither causal nor a sliding window")
        # Transformers' eager attention obeys the mask, and so do we; the argument repeats it for kernels
        window = rule.window
    scale = extra.get("scaling")
    return AttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        v_head_dim=v.shape[2],
        scale=float(scale) if scale is not None else q.shape[2] ** -0.5,
        sliding_window=window,
        softcap=extra.get("softcap"),
        sinks=extra.get("s_aux"),
    )


@dataclass(frozen=True)
class MaskRule:
    """What a mask allows: causal within ``window`` tokens (None: all), or something else."""

    is_understood: bool
    window: int | None = None


def telling_mask(**arguments: Any) -> Tensor:
    """The eager mask of Transformers with the rule behind it attached; the signature is Transformers'."""
    mask: Tensor = eager_mask(**{**arguments, "allow_is_bidirectional_skip": False})
    setattr(mask, _RULE, read_rule(arguments["mask_function"], arguments.get("local_size")))
    return mask


def read_rule(mask_function: Callable[..., Tensor], local_size: int | None) -> MaskRule:
    """Compares a mask function (batch, head, query, key) → allowed with the two rules known here.

    Positions are dense near the beginning and near multiples of the local size, and sparse up to 2²⁰.
    """
    near = [0, 1, 2, 3, 5, 8]
    anchors = [local_size * i for i in (1, 2, 3)] if local_size else []
    far = [2**power + offset for power in range(3, 21) for offset in (-1, 0)]
    spots = sorted({max(0, a + d) for a in anchors for d in (-2, -1, 0, 1, 2)} | set(near) | set(far))
    position = torch.tensor(spots)
    q, k = position[:, None], position[None, :]
    try:
        zero = torch.tensor(0)
        allowed = mask_function(zero, zero, q, k).expand(len(spots), len(spots))
    except (IndexError, RuntimeError, TypeError):
        return MaskRule(is_understood=False)  # it looks positions up in tensors of the probe's length
    causal = k <= q
    if torch.equal(allowed, causal):
        return MaskRule(is_understood=True)
    if local_size and torch.equal(allowed, causal & (k > q - local_size)):
        return MaskRule(is_understood=True, window=local_size)
    return MaskRule(is_understood=False)
