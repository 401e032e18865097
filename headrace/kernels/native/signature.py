"""What each op of the table hands to a native kernel: slots, ints and floats, in this order.

Shapes are in docs/kernels.md. A slot's role:

    input    read only, changes with every call
    weight   read only, the same for as long as the model lives; absent once the kernel has packed it
    inout    read and written (the cache, what rope turns)
    output   written whole, not read
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Role = Literal["input", "weight", "inout", "output"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""The int ``activation`` is an index into these."""

CALL_INTS = ("block_size", "num_decodes")
"""Ints that belong to a call and not to its weights; 0 while a kernel packs."""


@dataclass(frozen=True)
class Slot:
    """One tensor of a call; an ``optional`` one may be absent (data NULL)."""

    name: str
    role: Role
    optional: bool = False


@dataclass(frozen=True)
class Signature:
    """One op's slots and numbers; ``index`` and the two like it raise KeyError for an unknown name."""

    op: str
    slots: tuple[Slot, ...]
    ints: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()

    @cached_property
    def _places(self) -> dict[str, int]:
        return {slot.name: place for place, slot in enumerate(self.slots)}

    def index(self, name: str) -> int:
        """A slot's place."""
        return self._places[name]

    def slot(self, name: str) -> Slot:
        return self.slots[self._places[name]]

    def names(self, *roles: Role) -> tuple[str, ...]:
        """Slots of these roles, in order; of any role when none is named."""
        return tuple(slot.name for slot in self.slots if not roles or slot.role in roles)

    @property
    def has_batch(self) -> bool:
        """Whether its calls know which rows are decodes and which are prefill."""
        return "num_decodes" in self.ints


def slots(text: str) -> tuple[Slot, ...]:
    """Slots from words such as ``x weight:weight bias:weight? out:output``; a bare name is an input."""
    found = []
    for word in text.split():
        name, _, role = word.removesuffix("?").partition(":")
        assert role in ("", "input", "weight", "inout", "output"), word
        found.append(Slot(name, role or "input", word.endswith("?")))  # type: ignore[arg-type]
    return tuple(found)


_CACHE = "keys:inout values:inout slot_mapping block_tables lens chunks? chunk_tables? sinks:weight?"
_ATTENTION_WEIGHTS = (
    "qkv:weight qkv_bias:weight? o:weight o_bias:weight? q_norm:weight? k_norm:weight? cos sin"
)
_MLP_WEIGHTS = "gate_up:weight gate_up_bias:weight? down:weight down_bias:weight?"
_LAYER_NORMS = "input_norm:weight? post_attention_norm:weight? pre_mlp_norm:weight? post_mlp_norm:weight?"
_ATTENTION_INTS = ("block_size", "num_decodes", "window", "num_kv_heads")
_BLOCK_INTS = (*_ATTENTION_INTS, "num_heads", "head_dim", "v_head_dim", "qk_norm_full")
_ATTENTION_FLOATS = ("scale", "softcap")
_BLOCK_FLOATS = (*_ATTENTION_FLOATS, "qk_norm_eps", "qk_norm_offset")

SIGNATURES: dict[str, Signature] = {
    signature.op: signature
    for signature in (
        Signature("linear", slots("x weight:weight bias:weight? residual? out:output")),
        Signature("gated_linear", slots("x weight:weight bias:weight? out:output"), ("activation",)),
        Signature("mlp_block", slots(f"x {_MLP_WEIGHTS} residual? out:output"), ("activation",)),
        Signature("rms_norm", slots("x weight:weight out:output"), (), ("eps", "offset")),
        Signature("rope", slots("x:inout cos sin")),
        Signature("activation_and_mul", slots("x out:output"), ("activation",)),
        Signature("attention", slots(f"q k v {_CACHE} out:output"), _ATTENTION_INTS, _ATTENTION_FLOATS),
        Signature(
            "attention_block",
            slots(f"x {_ATTENTION_WEIGHTS} {_CACHE} residual? out:output"),
            _BLOCK_INTS,
            _BLOCK_FLOATS,
        ),
        Signature(
            "decoder_layer",
            slots(f"x {_LAYER_NORMS} {_ATTENTION_WEIGHTS} {_CACHE} {_MLP_WEIGHTS} out:output"),
            (*_BLOCK_INTS, "activation"),
            (*_BLOCK_FLOATS, "norm_eps", "norm_offset"),
        ),
        Signature("logits_head", slots("x weight:weight bias:weight? out:output"), (), ("softcap",)),
    )
}
"""By op of the table; ``embedding`` and ``pack_linear`` have none."""
