"""The dispatch table: which implementation of each op runs.

A table never changes; ``replace`` makes a new one, and a model takes it between steps (``model.ops = …``).
Composite ops get the table they are called through, so a composite that no pack provides falls through
to whatever the table holds for its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import UsageError
from headrace.kernels import composite, reference, stock
from headrace.kernels.weights import PackedLinear

LEAVES = (
    "embedding",
    "linear",
    "rms_norm",
    "rope",
    "activation_and_mul",
    "attention",
    "logits_head",
    "pack_linear",
)
COMPOSITES = ("gated_linear", "attention_block", "mlp_block", "decoder_layer")


class OpTable:
    """One attribute per op; signatures and shapes are those of ``reference`` and ``composite``.

    A composite is called without its first argument: the table binds itself there.
    """

    def __init__(self, ops: Mapping[str, Callable[..., Any]], provenance: Mapping[str, str]) -> None:
        self._ops = dict(ops)
        self.provenance: Mapping[str, str] = MappingProxyType(dict(provenance))
        assert set(self._ops) == set(self.names()) == set(self.provenance)
        self.embedding: Callable[..., Tensor] = ops["embedding"]
        self.linear: Callable[..., Tensor] = ops["linear"]
        self.rms_norm: Callable[..., Tensor] = ops["rms_norm"]
        self.rope: Callable[..., Tensor] = ops["rope"]
        self.activation_and_mul: Callable[..., Tensor] = ops["activation_and_mul"]
        self.attention: Callable[..., Tensor] = ops["attention"]
        self.logits_head: Callable[..., Tensor] = ops["logits_head"]
        self.pack_linear: Callable[..., PackedLinear] = ops["pack_linear"]
        self.gated_linear: Callable[..., Tensor] = partial(ops["gated_linear"], self)
        self.attention_block: Callable[..., Tensor] = partial(ops["attention_block"], self)
        self.mlp_block: Callable[..., Tensor] = partial(ops["mlp_block"], self)
        self.decoder_layer: Callable[..., Tensor] = partial(ops["decoder_layer"], self)

    @property
    def nbytes(self) -> int:
        """Bytes that ops hold beside the model's own weights: a pack's forms of them."""
        return sum(getattr(op, "nbytes", 0) for op in self._ops.values())

    def unbound(self, name: str) -> Callable[..., Any]:
        """An op as it was given; a composite then takes the table to call its parts through first."""
        return self._ops[name]

    @staticmethod
    def names() -> tuple[str, ...]:
        """Every op, leaves first."""
        return LEAVES + COMPOSITES

    @classmethod
    def reference(cls) -> OpTable:
        """Plain torch for every op."""
        ops = {name: getattr(reference, name) for name in LEAVES}
        ops |= {name: getattr(composite, name) for name in COMPOSITES}
        return cls(ops, dict.fromkeys(ops, "reference"))

    @classmethod
    def stock(
        cls,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        quantization: str = "none",
        *,
        decode_copies: bool = True,
    ) -> OpTable:
        """The best stock torch operators for a device, dtype and ``quantization`` (none or int8).

        ``decode_copies``: on a CPU in bfloat16, hold every weight a second time in the form that is read
        fastest when a step has few rows.
        """
        ops = stock.select(torch.device(device), dtype, quantization, decode_copies)
        return cls.reference().replace(source="stock", **ops)

    def replace(self, *, source: str = "custom", **ops: Callable[..., Any]) -> OpTable:
        """A new table with some ops exchanged; ``source`` names where they come from (a pack's id)."""
        unknown = sorted(set(ops) - set(self.names()))
        if unknown:
            raise UsageError(
                f"no op named {', '.join(unknown)}", hint=f"the ops are {', '.join(self.names())}"
            )
        return OpTable({**self._ops, **ops}, {**self.provenance, **dict.fromkeys(ops, source)})
