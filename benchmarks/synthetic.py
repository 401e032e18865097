"""A model of random weights with a long context, made once in the cache: for time, never for text.

4 layers, hidden 512, 8 query and 2 key-value heads of 64, context 262,144, the tokenizer of SmolLM2.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from benchmarks import peers

VERSION = 1
CONTEXT = 262_144
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5_000_000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "vocab_size": 49_152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def long_context_model() -> Path:
    """Its folder; built beside and moved into place."""
    folder = peers.cache_root() / "bench" / f"synthetic-long-v{VERSION}"
    if folder.exists():
        return folder
    import torch
    from safetensors.torch import save_file

    from headrace.models.resolve import resolve_model

    source = resolve_model("smollm2-135m").folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02).to(
            torch.bfloat16
        )
        for name, shape in _shapes().items()
    }
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(CONFIG, indent=2))
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy2(source / name, partial / name)
    partial.rename(folder)
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = 512, 1536, 64
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (49_152, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(4):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (8 * head_dim, hidden),
            layer + "self_attn.k_proj.weight": (2 * head_dim, hidden),
            layer + "self_attn.v_proj.weight": (2 * head_dim, hidden),
            layer + "self_attn.o_proj.weight": (hidden, 8 * head_dim),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes
