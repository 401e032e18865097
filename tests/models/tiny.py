"""Tiny random checkpoints of every family, saved the way real ones are.

Weights are drawn so that nothing is neutral: norms differ from one, biases from zero, attention scores are
large enough for soft-capping to bite, and the arg-max of the logits has a clear winner.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 320
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "pad_token_id": 0, "num_hidden_layers": 4}


def _rope(rope_type: str, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


_FACTORS = [1.0 + 0.5 * i for i in range(6)]

# family -> (config class, model class, what differs from _BASE)
_MAKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama_bias": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "llama_linear": ("LlamaConfig", "LlamaForCausalLM", _rope("linear", factor=4.0)),
    "llama_dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"max_position_embeddings": 24, **_rope("dynamic", factor=2.0)},
    ),
    "llama_yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        _rope("yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16.0, beta_slow=2.0),
    ),
    "llama3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 12, "head_dim": 32}),
    "mistral_full": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_sliding": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1, **_rope("default", 1e6)},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32, **_rope("default", 1e6)}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": 12,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3_linear": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 5.0,
        },
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"sliding_window": 14, **_rope("default", partial_rotary_factor=0.75)},
    ),
    "phi3_long": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 256,
            **_rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=_FACTORS,
                long_factor=[4.0 * f for f in _FACTORS],
            ),
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    # below: run by the Transformers fallback
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"rotary_pct": 0.25}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"qk_layernorm": False}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": 12}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.25, "pad_token_id": 0}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **_rope("default"),
        },
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    # below: must be refused
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 1, 0],
        },
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 8}),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    ),
}

# what our own decoder runs
FAMILIES = tuple(_MAKERS)[: list(_MAKERS).index("gpt2")]
# what the Transformers fallback runs; the last five route tokens to experts
FALLBACK_FAMILIES = (
    "gpt2",
    "gpt_neox",
    "stablelm",
    "starcoder2",
    "cohere",
    "granite",
    "olmo3",
    "opt",
    "mixtral",
    "qwen2_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
)


def make_tiny(
    family: str,
    folder: Path | str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Saves a random checkpoint (config.json, safetensors, generation_config.json) and returns its folder.

    ``overrides`` replace fields of the config; ``shard_size`` such as ``"40KB"`` splits the weights.
    """
    config_class, model_class, fields = _MAKERS[family]
    config = getattr(transformers, config_class)(**{**_BASE, **fields, **overrides})
    model = getattr(transformers, model_class)(config)
    randomize(model, seed)
    transformers.utils.logging.disable_progress_bar()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path, **({"max_shard_size": shard_size} if shard_size else {}))
    return path


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter anew from ``seed``, independent of torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.add_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name or "wte" in name:
                # small, so that layers and not the tied input token decide; Gemma scales it by 8
                parameter.copy_(noise * (0.125 if "Gemma" in type(model).__name__ else 0.3))
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


def load_reference(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in Transformers' own definition, with its eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()
