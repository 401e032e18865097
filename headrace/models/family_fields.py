"""What all families read alike from a config.json, and what none of them may leave unread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.models.config import Activation, DecoderConfig, RopeSpec
from headrace.models.fields import Fields
from headrace.models.rope_fields import read_rope

MAX_LAYERS = 4096

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields that change numbers in some family: refused unless read by the family or neutral.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "altup_num_inputs": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "layer_types": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_experts_per_tok": (0,),
    "num_kv_shared_layers": (0,),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1,),
    "position_embedding_type": ("rope", "rotary", "absolute"),
    "pruned_heads": ({}, []),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}

# Fields that never reach the forward pass.
_BOOKKEEPING = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}


def leftovers(fields: Fields, config: DecoderConfig) -> tuple[str, ...]:
    """Refuses unread fields that would change numbers; one note that lists the others."""
    ignored = []
    for name in sorted(set(fields.raw) - fields.read - _BOOKKEEPING):
        value = fields.raw[name]
        if name not in _NEUTRAL:
            ignored.append(name)
            continue
        neutral = value is None or value in _NEUTRAL[name]
        if name == "layer_types" and set(config.sliding_windows) == {None}:
            neutral = neutral or set(fields.texts(name) or ()) == {"full_attention"}
        if not neutral:
            raise UnsupportedModelError(
                f"{fields.where}: {name} = {str(value)[:100]} is not part of the {config.family} family",
                hint="check model_type, or remove the field if it is a leftover",
            )
    if not ignored:
        return ()
    return (f"{fields.where}: fields without a meaning in this family: {', '.join(ignored)}",)


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError when the checkpoint's weights are stored quantized."""
    holders = [raw, raw.get("text_config")]
    for holder in holders:
        stated = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if stated:
            method = stated.get("quant_method", "unknown") if isinstance(stated, Mapping) else "unknown"
            raise UnsupportedModelError(
                f"the checkpoint is quantized ({method}); weights in float32, float16 or bfloat16 are needed",
                hint="use the original checkpoint with --quantization int8, or a GGUF file",
            )


def base_config(
    fields: Fields,
    family: str,
    *,
    defaults: Mapping[str, int],
    eps: float,
    default_tie: bool = False,
    head_dim: int | None = None,
    ropes: Callable[[int, int], tuple[RopeSpec, ...]] | None = None,
    may_be_partial: bool = False,
    activation_field: str = "hidden_act",
    default_activation: str = "silu",
    **more: Any,
) -> DecoderConfig:
    """What all families share; ``more`` are fields of DecoderConfig, ``head_dim`` a fixed default."""

    def size(name: str, maximum: int = 2**31) -> int:
        return fields.integer(name, defaults[name], maximum=maximum)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    layers = size("num_hidden_layers", MAX_LAYERS)
    # null means as many as query heads; absence the family's default
    absent = not fields.given("num_key_value_heads")
    kv_heads = fields.integer(
        "num_key_value_heads", defaults.get("num_key_value_heads", heads) if absent else heads
    )
    if heads % kv_heads:
        raise CorruptFileError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head = fields.integer("head_dim", head_dim or max(1, hidden // heads))
    positions = size("max_position_embeddings")
    activation = fields.text(activation_field, default_activation)
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: activation {activation!r} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    specs = ropes(head, positions) if ropes else (_one_rope(fields, head, positions, may_be_partial),)
    config = DecoderConfig(
        family=family,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=_served_positions(specs, positions),
        norm_eps=fields.positive("rms_norm_eps", eps),
        attention_scale=head**-0.5,
        ropes=specs,
        layer_ropes=(0,) * layers,
        sliding_windows=(None,) * layers,
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=fields.flag("tie_word_embeddings", default_tie),
    )
    return replace(config, **more)


def _one_rope(fields: Fields, head_dim: int, positions: int, may_be_partial: bool = False) -> RopeSpec:
    """The same rotary embedding in all layers, in the new or the old notation."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    return read_rope(
        old or new,
        theta=fields.positive("rope_theta", 10_000.0),
        head_dim=head_dim,
        max_positions=positions,
        original_max_positions=fields.optional_integer("original_max_position_embeddings"),
        partial_rotary_factor=fields.positive("partial_rotary_factor", 1.0),
        may_be_partial=may_be_partial,
        where="config.json: " + ("rope_scaling" if old else "rope_parameters"),
    )


def _served_positions(ropes: tuple[RopeSpec, ...], positions: int) -> int:
    """How far the rotary embedding carries: dynamic and yarn state their reach by a factor."""
    for rope in ropes:
        if rope.kind == "dynamic":
            positions = max(positions, int(positions * rope.factor))
        elif rope.kind == "yarn":
            positions = max(positions, int(rope.original_max_positions * rope.factor))
        elif rope.kind == "longrope":
            positions = min(positions, rope.original_max_positions)
    return positions


def layer_windows(
    fields: Fields, num_layers: int, window: int | None, default: list[str]
) -> tuple[int | None, ...]:
    """Each layer's window from ``layer_types``."""
    kinds = fields.texts("layer_types") or default
    if len(kinds) < num_layers:
        raise CorruptFileError(f"config.json: {len(kinds)} layer_types for {num_layers} layers")
    known = ("full_attention", "sliding_attention")
    for kind in kinds[:num_layers]:
        if kind not in known:
            raise UnsupportedModelError(
                f"config.json: layer type {kind!r}; only {' and '.join(known)} are supported"
            )
        if kind == "sliding_attention" and window is None:
            raise CorruptFileError(
                "config.json: layer_types asks for sliding_attention, sliding_window is null"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])


def stated_window(fields: Fields, default: int | None) -> int | None:
    """``sliding_window`` where null means none and absence the family's default."""
    return fields.optional_integer("sliding_window") if fields.given("sliding_window") else default


def softcap(fields: Fields, name: str, default: float | None) -> float | None:
    value = fields.optional_number(name) if fields.given(name) else default
    if value is not None and value <= 0:
        raise fields.wrong(name, "a number above 0, or null")
    return value
