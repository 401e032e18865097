"""From a Hugging Face config.json to a DecoderConfig, family by family.

    family        norms  q/k norm     attention            biases       RoPE
    llama         pre    –            full                 by config    all kinds
    mistral       pre    –            window, all layers   –            all kinds
    qwen2         pre    –            by layer             qkv          all kinds
    qwen3         pre    head         by layer             by config    all kinds
    gemma2        both   –            alternating, capped  by config    all kinds
    gemma3_text   both   head         by layer             by config    one per kind of layer
    phi3          pre    –            window, all layers   –            default, longrope; partial
    olmo2         post   projection   full                 by config    all kinds

Defaults are those of Transformers' configuration classes. Whatever would change numbers and is not
understood here is refused; a field that Transformers' definition does not read either is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.core.errors import UnsupportedModelError
from headrace.models.config import DecoderConfig, RopeSpec
from headrace.models.family_fields import (
    base_config,
    layer_windows,
    leftovers,
    refuse_quantized,
    softcap,
    stated_window,
)
from headrace.models.fields import Fields
from headrace.models.rope_fields import read_rope


def covers(raw: Mapping[str, Any]) -> bool:
    """Whether our own decoder runs this config.json, its details not yet looked at."""
    model_type = raw.get("model_type")
    return isinstance(model_type, str) and model_type in _FAMILIES


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json of a covered family describes.

    Raises CorruptFileError for a field of the wrong type, UnsupportedModelError for one that asks for
    something else than this decoder computes.
    """
    fields = Fields(raw)
    model_type = fields.text("model_type")
    reader = _FAMILIES[model_type]
    refuse_quantized(raw)
    for architecture in fields.texts("architectures") or []:
        if not architecture.endswith(("ForCausalLM", "LMHeadModel", "Model", "ForConditionalGeneration")):
            raise UnsupportedModelError(
                f"config.json names {architecture}, which does not generate text",
                hint="give a causal language model",
            )
    config = reader(fields)
    return replace(config, notes=config.notes + leftovers(fields, config))


def _llama(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    defaults = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
    mlp_bias = fields.flag("mlp_bias", False)
    return base_config(
        fields, "llama", defaults=defaults, eps=1e-6, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias
    )


def _mistral(fields: Fields) -> DecoderConfig:
    defaults = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    config = base_config(fields, "mistral", defaults=defaults, eps=1e-6)
    return replace(config, sliding_windows=(stated_window(fields, 4096),) * config.num_layers)


def _qwen(fields: Fields, family: str, **more: Any) -> DecoderConfig:
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    }
    config = base_config(fields, family, defaults=defaults, eps=1e-6, **more)
    window = stated_window(fields, 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 28, minimum=0)
    default = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(config.num_layers)
    ]
    return replace(config, sliding_windows=layer_windows(fields, config.num_layers, window, default))


def _qwen2(fields: Fields) -> DecoderConfig:
    return _qwen(fields, "qwen2", qkv_bias=True)


def _qwen3(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return _qwen(fields, "qwen3", qkv_bias=bias, out_bias=bias, head_dim=128, qk_norm="head")


_GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def _gemma(fields: Fields, family: str, **more: Any) -> DecoderConfig:
    fields.value("hidden_act")  # Gemma reads hidden_activation only
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention; only causal attention is served"
        )
    bias = fields.flag("attention_bias", False)
    config = base_config(
        fields,
        family,
        eps=1e-6,
        default_tie=True,
        head_dim=256,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        norm_placement="both",
        norm_plus_one=True,
        qkv_bias=bias,
        out_bias=bias,
        **more,
    )
    return replace(
        config,
        attention_scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
    )


def _gemma2(fields: Fields) -> DecoderConfig:
    defaults = {**_GEMMA_DEFAULTS, "vocab_size": 256000, "max_position_embeddings": 8192}
    config = _gemma(fields, "gemma2", defaults=defaults)
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(config.num_layers)]
    return replace(
        config,
        sliding_windows=layer_windows(fields, config.num_layers, stated_window(fields, 4096), kinds),
        attention_softcap=softcap(fields, "attn_logit_softcapping", 50.0),
        final_softcap=softcap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3_text(fields: Fields) -> DecoderConfig:
    if fields.value("attn_logit_softcapping") is not None:
        raise UnsupportedModelError(
            "config.json: attn_logit_softcapping in Gemma 3; Transformers' definition ignores it there",
            hint="set it to null if the model was trained without",
        )
    defaults = {**_GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072}

    def ropes(head_dim: int, positions: int) -> tuple[RopeSpec, ...]:
        """Full layers first: the old notation scales those only."""
        new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
        stray = sorted(set(new) - {"full_attention", "sliding_attention"})
        if stray:
            raise UnsupportedModelError(
                f"config.json: rope_parameters has {', '.join(stray)}; Gemma 3 has one per kind of layer",
                hint="nest them under full_attention and sliding_attention",
            )
        full, local = (
            Fields(new, "config.json: rope_parameters").mapping(kind)
            for kind in ("full_attention", "sliding_attention")
        )
        full_theta = fields.positive("rope_theta", 1_000_000.0)
        local_theta = fields.positive("rope_local_base_freq", 10_000.0)
        return tuple(
            read_rope(params, theta=theta, head_dim=head_dim, max_positions=positions)
            for params, theta in (({**full, **old}, full_theta), (local, local_theta))
        )

    config = _gemma(fields, "gemma3", defaults=defaults, ropes=ropes, qk_norm="head")
    pattern = fields.integer("sliding_window_pattern", 6)
    kinds = [
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(config.num_layers)
    ]
    windows = layer_windows(fields, config.num_layers, stated_window(fields, 4096), kinds)
    return replace(
        config,
        sliding_windows=windows,
        layer_ropes=tuple(0 if window is None else 1 for window in windows),
        final_softcap=softcap(fields, "final_logit_softcapping", None),
    )


def _gemma3(fields: Fields) -> DecoderConfig:
    """The text part of a checkpoint that also reads images."""
    text = Fields(fields.mapping("text_config"), "config.json: text_config")
    if text.text("model_type", "gemma3_text") != "gemma3_text":
        raise UnsupportedModelError("config.json: text_config is not gemma3_text")
    config = _gemma3_text(text)
    for name in ("vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index"):
        fields.value(name)
    fields.value("eoi_token_index")
    tied = fields.flag("tie_word_embeddings", True)
    notes = ("the text part is served; images are not", *leftovers(text, config))
    return replace(config, tie_word_embeddings=tied, notes=notes)


def _phi3(fields: Fields) -> DecoderConfig:
    defaults = {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    }

    def ropes(head_dim: int, positions: int) -> tuple[RopeSpec, ...]:
        params = dict(fields.mapping("rope_scaling") or fields.mapping("rope_parameters"))
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind in ("su", "yarn"):  # what early checkpoints called it
            kind = "longrope"
        if kind not in ("default", "longrope"):
            raise UnsupportedModelError(f"config.json: rope type {kind!r} is not part of the phi3 family")
        params["rope_type"] = kind
        params.pop("type", None)
        return (
            read_rope(
                params,
                theta=fields.positive("rope_theta", 10_000.0),
                head_dim=head_dim,
                max_positions=positions,
                original_max_positions=fields.integer("original_max_position_embeddings", 4096),
                partial_rotary_factor=fields.positive("partial_rotary_factor", 1.0),
                may_be_partial=True,
            ),
        )

    config = base_config(fields, "phi3", defaults=defaults, eps=1e-5, ropes=ropes, fused_checkpoint=True)
    notes: tuple[str, ...] = ()
    if config.ropes[0].kind == "longrope":
        notes = (
            f"longrope: served up to {config.max_position_embeddings} tokens, where the short factors hold; "
            "beyond, other factors would need another cache",
        )
    windows = (stated_window(fields, None),) * config.num_layers
    return replace(config, sliding_windows=windows, notes=notes)


def _olmo2(fields: Fields) -> DecoderConfig:
    defaults = {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
    bias = fields.flag("attention_bias", False)
    return base_config(
        fields,
        "olmo2",
        defaults=defaults,
        eps=1e-5,
        norm_placement="post",
        qk_norm="projection",
        qkv_bias=bias,
        out_bias=bias,
    )


_FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "phi3": _phi3,
    "olmo2": _olmo2,
}
