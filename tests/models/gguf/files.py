"""Small GGUF files, written with the `gguf` package the way llama.cpp's converter writes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
BASE = {
    "vocab_size": len(SPECIALS) + len(BYTES) + len(MERGES) + 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": ROPE},
    "llama-biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": ROPE,
    },
    "llama-wide-heads": {"model_type": "llama", "head_dim": 32, "rope_parameters": ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "rope_parameters": ROPE},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "rope_parameters": ROPE},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, "rope_parameters": ROPE},
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
    },
    "phi3": {"model_type": "phi3", "rope_parameters": ROPE},
    "olmo2": {"model_type": "olmo2", "rope_parameters": ROPE},
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def tiny_model(options: dict[str, Any], seed: int = 0) -> Any:
    """A random model of BASE size; every parameter, norms included, differs from its default."""
    options = BASE | options
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(options.pop("model_type"), **options), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0 if "norm" not in name else 0.5, 0.1)
    return model


def add_byte_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre: str = "gpt-2") -> None:
    """Byte-level BPE: SPECIALS, all bytes, the results of MERGES, then unused tokens."""
    tokens = [*SPECIALS, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
    types = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    types += [5] * (len(tokens) - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type in ("llama", "mistral", "phi3"):
        writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def converted_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The state dict under llama.cpp's names, changed as its converter changes it."""
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = (
                array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                .swapaxes(1, 2)
                .reshape(array.shape)
            )
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        tensors[ours] = np.ascontiguousarray(array)
    return tensors


def write_model(path: Path, model: Any, *, extra: Any = None, types: dict[str, Any] | None = None) -> Path:
    """A whole GGUF file; ``types``: quantization by end of tensor name; ``extra(writer)`` adds to it."""
    architecture = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    add_config(writer, model.config)
    add_byte_tokenizer(writer, model.config.vocab_size)
    if extra is not None:
        extra(writer)
    for name, array in converted_tensors(model, architecture).items():
        kind = next((kind for end, kind in (types or {}).items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_freqs(scaling: dict[str, Any], base: float, head_dim: int) -> np.ndarray:
    """rope_freqs.weight, in the converter's own way: one wave after the other."""
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * base ** (i / head_dim)
        original = scaling["original_max_position_embeddings"]
        if wave < original / scaling["high_freq_factor"]:
            factors.append(1.0)
        elif wave > original / scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wave - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
