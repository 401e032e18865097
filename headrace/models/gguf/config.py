"""GGUF metadata and tensor names to a Hugging Face ``config.json`` and state dict.

What llama.cpp's converter changed on the way in is undone here: rows of q and k that it interleaved for
its rotary layout (llama), and the 1 it added to Gemma's norm weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.kernels.dequantize import dequantize
from headrace.models.gguf.reader import GGUFFile, Tensor, describe

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORM = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = (
    _ATTENTION | _MLP | _POST_NORM | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
)
_PHI3 = _PRE_NORM | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Family:
    """How one GGUF architecture is spelled in Transformers."""

    model_type: str
    model_class: str
    layer_names: dict[str, str]
    interleaved_rotary: bool = False  # q and k rows as llama.cpp's NORM rotary wants them
    norm_offset: bool = False  # norm weights stored as 1 + w
    qkv_bias: bool = False  # always there, and no flag in config.json
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama", "LlamaForCausalLM", _PRE_NORM | _ATTENTION | _MLP, True, options={"hidden_act": "silu"}
    ),
    "qwen2": Family(
        "qwen2", "Qwen2ForCausalLM", _PRE_NORM | _ATTENTION | _MLP, qkv_bias=True,
        options={"hidden_act": "silu", "use_sliding_window": False},
    ),
    "qwen3": Family(
        "qwen3", "Qwen3ForCausalLM", _PRE_NORM | _ATTENTION | _MLP | _QK_NORM,
        options={"hidden_act": "silu", "use_sliding_window": False},
    ),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", _GEMMA, norm_offset=True,
        options={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", _GEMMA | _QK_NORM, norm_offset=True,
        options={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", _PHI3, options={"hidden_act": "silu"}),
    "olmo2": Family(
        "olmo2", "Olmo2ForCausalLM", _ATTENTION | _MLP | _QK_NORM | _POST_NORM,
        options={"hidden_act": "silu"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class WeightSource:
    """Where one tensor of the converted model comes from, and what to undo."""

    name: str
    tensor: Tensor
    interleaved_heads: int = 0  # >0: undo llama.cpp's row interleaving of that many heads
    minus_one: bool = False


@dataclass(frozen=True)
class MappedModel:
    """A GGUF file understood: ``config`` is what goes into config.json, ``weights`` the state dict."""

    config: dict[str, Any]
    weights: list[WeightSource]


def map_model(file: GGUFFile) -> MappedModel:
    """Config and weights in Transformers' terms.

    Raises UnsupportedModelError for an architecture or a detail of it that cannot be expressed exactly,
    CorruptFileError where metadata or tensors are missing or contradict each other.
    """
    mapping = _Mapping(file)
    config = mapping.config()
    return MappedModel(config, mapping.weights(config))


class _Mapping:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.architecture
        if self.architecture not in FAMILIES:
            raise UnsupportedModelError(
                f"{file.path}: architecture {self.architecture!r} cannot be read from GGUF; "
                f"supported are {', '.join(FAMILIES)}",
                hint="Use the model's Hugging Face folder (config.json and safetensors) instead.",
            )
        self.family = FAMILIES[self.architecture]

    # metadata

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture; a per-layer array counts as its one common value."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray) and len(value):
            if (value != value[0]).any():
                self.unsupported(f"{key} differs between layers")
            value = value[0].item()
        return value

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 31:
            self.corrupt(f"{self.architecture}.{key} must be an integer from {low}, is {describe(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 3e38:
            self.corrupt(f"{self.architecture}.{key} must be a finite number, is {describe(value)}")
        return _shortest(value)

    def corrupt(self, message: str) -> NoReturn:
        raise CorruptFileError(f"{self.file.path}: {message}")

    def unsupported(self, message: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.file.path}: {message}, which cannot be converted faithfully",
            hint="Use the model's Hugging Face folder (config.json and safetensors) instead.",
        )

    # config.json

    def config(self) -> dict[str, Any]:
        family, tensors = self.family, self.file.tensors
        if self.integer("expert_count", 0, low=0):
            self.unsupported(f"architecture {self.architecture} with a mixture of experts")
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            self.corrupt("the tensor token_embd.weight is missing or not a matrix")
        heads = self.integer("attention.head_count")
        hidden = self.integer("embedding_length")
        head_dim = self.head_dim(hidden, heads)
        config: dict[str, Any] = {
            "architectures": [family.model_class],
            "model_type": family.model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": self.rope_scaling(head_dim),
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            **family.options,
        }
        if not family.qkv_bias and family.model_type != "phi3":
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        specific = getattr(self, f"_{self.architecture}", None)
        if specific is not None:
            specific(config)
        return config

    def head_dim(self, hidden: int, heads: int) -> int:
        if hidden % heads and self.get("attention.key_length") is None:
            self.corrupt(f"embedding_length {hidden} is no multiple of {heads} heads")
        head_dim = self.integer("attention.key_length", hidden // heads)
        if head_dim % 2:
            self.corrupt(f"heads must have an even size, theirs is {head_dim}")
        value_dim = self.integer("attention.value_length", head_dim)
        if value_dim != head_dim:
            self.unsupported(f"key heads of {head_dim} and value heads of {value_dim}")
        rotary = self.integer("rope.dimension_count", head_dim)
        if rotary != head_dim and self.family.model_type != "phi3":
            self.unsupported(f"rotary positions on {rotary} of {head_dim} head dimensions")
        return head_dim

    def rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self.file.tensors:
            return self.llama3_scaling(head_dim)
        linear = self.number("rope.scale_linear", 1.0)
        kind = self.get("rope.scaling.type", "linear" if linear != 1.0 else "none")
        factor = self.number("rope.scaling.factor", linear)
        if kind == "linear" and factor not in (0.0, 1.0):
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return self.yarn_scaling(factor)
        if kind not in ("none", "linear", "longrope"):
            self.unsupported(f"rope scaling {describe(kind)}")
        return None

    def yarn_scaling(self, factor: float) -> dict[str, Any]:
        if self.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            self.unsupported("YaRN with an extrapolation factor other than 1")
        if factor < 1.0:
            self.corrupt(f"the YaRN factor must be at least 1, is {factor}")
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.integer("rope.scaling.original_context_length"),
        }
        attention = self.number("rope.scaling.attn_factor", 1.0) * self.number(
            "rope.scaling.yarn_attn_factor", 1.0
        )
        if attention != 1.0:
            # llama.cpp multiplies its factor by what the paper (arXiv 2309.00071, eq. 22) prescribes.
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if self.get(f"rope.scaling.{theirs}") is not None:
                scaling[ours] = self.number(f"rope.scaling.{theirs}")
        return scaling

    def llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """Llama 3's scaling, found again from the divisors that the converter baked into a tensor.

        Only accepted when the formula gives every divisor back.
        """
        tensor = self.file.tensors["rope_freqs.weight"]
        divisors = dequantize(tensor.data, tensor.type).astype(np.float64)
        if divisors.shape != (head_dim // 2,):
            self.corrupt(f"rope_freqs.weight needs {head_dim // 2} numbers, it has {len(divisors)}")
        base = self.number("rope.freq_base", 10000.0)
        factor = _shortest(float(divisors.max()))
        for original in (8192, self.integer("rope.scaling.original_context_length", 8192)):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
            if np.allclose(llama3_divisors(scaling, base, head_dim), divisors, rtol=1e-5, atol=0):
                break
        else:
            self.unsupported("rope_freqs.weight that Llama 3's rope scaling does not explain")
        return scaling

    # what single architectures add

    def _llama(self, config: dict[str, Any]) -> None:
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in self.file.tensors
        window = self.integer("attention.sliding_window", 0, low=0)
        if window:
            config |= {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": window,
            }
            if config.pop("attention_bias") or config.pop("mlp_bias"):
                self.unsupported("a sliding window together with biases")

    def _qwen2(self, config: dict[str, Any]) -> None:
        if self.integer("attention.sliding_window", 0, low=0):
            self.unsupported("Qwen with a sliding window")

    _qwen3 = _qwen2

    def _gemma2(self, config: dict[str, Any]) -> None:
        layers = config["num_hidden_layers"]
        config |= {
            "attn_logit_softcapping": self.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self.number("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": self.query_scalar(config, 46),
            "sliding_window": self.integer("attention.sliding_window", 4096),
            "layer_types": _layer_types(layers, 2),
        }

    def _gemma3(self, config: dict[str, Any]) -> None:
        pattern = self.file.metadata.get("gemma3.attention.sliding_window_pattern", 6)
        if not isinstance(pattern, int) or pattern < 1:
            self.unsupported(f"a sliding window pattern of {describe(pattern)}")
        layers = config["num_hidden_layers"]
        softcap = self.number("final_logit_softcapping", 0.0)
        config |= {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": softcap or None,
            "query_pre_attn_scalar": self.query_scalar(config, 62),
            "sliding_window": self.integer("attention.sliding_window", 1024),
            "sliding_window_pattern": pattern,
            "layer_types": _layer_types(layers, pattern),
            "rope_theta": self.number("rope.freq_base", 1e6),
            "rope_local_base_freq": self.number("rope.freq_base_swa", 10000.0),
        }

    def query_scalar(self, config: dict[str, Any], layers_of_27b: int) -> int:
        """Gemma's attention scale is 1/sqrt of this; only the 27B models differ from the head size.

        GGUF does not carry it: llama.cpp tells the 27B models by their number of layers, and so do we.
        """
        if config["num_hidden_layers"] == layers_of_27b:
            return int(config["hidden_size"] // config["num_attention_heads"])
        return int(config["head_dim"])

    def _phi3(self, config: dict[str, Any]) -> None:
        head_dim = config.pop("head_dim")
        if head_dim * config["num_attention_heads"] != config["hidden_size"]:
            self.unsupported("Phi-3 with heads that do not add up to the hidden size")
        rotary = self.integer("rope.dimension_count", head_dim)
        window = self.integer("attention.sliding_window", 0, low=0)
        original = self.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        config |= {
            "sliding_window": window or None,
            "partial_rotary_factor": rotary / head_dim,
            "original_max_position_embeddings": original,
        }
        tables = {}
        for ours, name in (("short_factor", _ROPE_TABLES[2]), ("long_factor", _ROPE_TABLES[1])):
            tensor = self.file.tensors.get(name)
            if tensor is not None:
                values = dequantize(tensor.data, tensor.type)
                if len(values) != rotary // 2:
                    self.corrupt(f"{name} needs {rotary // 2} numbers, it has {len(values)}")
                tables[ours] = [_shortest(value) for value in values.tolist()]
        if tables or self.get("rope.scaling.type") == "longrope":
            if len(tables) != 2:
                self.corrupt("LongRoPE needs both rope_factors_short.weight and rope_factors_long.weight")
            config["rope_scaling"] = {"rope_type": "longrope", **tables}
            if self.get("rope.scaling.attn_factor") is not None:
                config["rope_scaling"]["attention_factor"] = self.number("rope.scaling.attn_factor")
        elif config["rope_scaling"] is not None:
            self.unsupported("Phi-3 with a rope scaling other than LongRoPE")

    def _olmo2(self, config: dict[str, Any]) -> None:
        if self.integer("attention.sliding_window", 0, low=0):
            self.unsupported("OLMo with a sliding window (OLMo 3)")
        head_dim = config.pop("head_dim")
        if head_dim * config["num_attention_heads"] != config["hidden_size"]:
            self.unsupported("OLMo 2 with heads that do not add up to the hidden size")

    # weights

    def weights(self, config: dict[str, Any]) -> list[WeightSource]:
        shapes = self.shapes(config)
        tensors = self.file.tensors
        unknown = [name for name in tensors if name not in shapes and name not in _ROPE_TABLES]
        if unknown:
            raise UnsupportedModelError(
                f"{self.file.path}: tensor {unknown[0]} is not part of architecture {self.architecture} "
                f"as known here ({len(unknown)} such tensors)",
            )
        sources = []
        for name, (target, shape) in shapes.items():
            tensor = tensors.get(name)
            if tensor is None:
                self.corrupt(f"tensor {name} is missing")
            if tensor.shape != shape:
                self.corrupt(f"tensor {name} needs the shape {list(shape)}, it has {list(tensor.shape)}")
            heads = 0
            if self.family.interleaved_rotary and ".attn_q." in name:
                heads = config["num_attention_heads"]
            elif self.family.interleaved_rotary and ".attn_k." in name:
                heads = config["num_key_value_heads"]
            offset = self.family.norm_offset and name.endswith("norm.weight")
            sources.append(WeightSource(target, tensor, heads, offset))
        return sources

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Every tensor the file must hold: GGUF name to (Transformers name, shape)."""
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim", hidden // heads)
        wide, narrow = heads * head_dim, kv_heads * head_dim
        qk_norm = (wide, narrow) if self.architecture == "olmo2" else (head_dim, head_dim)
        per_layer = {
            "attn_q": (wide, hidden),
            "attn_k": (narrow, hidden),
            "attn_v": (narrow, hidden),
            "attn_qkv": (wide + 2 * narrow, hidden),
            "attn_output": (hidden, wide),
            "attn_q_norm": (qk_norm[0],),
            "attn_k_norm": (qk_norm[1],),
            "ffn_gate": (inner, hidden),
            "ffn_up": (2 * inner if self.architecture == "phi3" else inner, hidden),
            "ffn_down": (hidden, inner),
        }
        biased: tuple[str, ...] = ()
        if self.family.qkv_bias or config.get("attention_bias"):
            biased += ("attn_q", "attn_k", "attn_v")
        if config.get("attention_bias"):
            biased += ("attn_output",)
        if config.get("mlp_bias"):
            biased += ("ffn_gate", "ffn_up", "ffn_down")
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
            "output_norm.weight": ("model.norm.weight", (hidden,)),
        }
        if not config["tie_word_embeddings"]:
            shapes["output.weight"] = ("lm_head.weight", (config["vocab_size"], hidden))
        # A block count far beyond the tensors there are would only build a long list of missing names.
        layers = min(config["num_hidden_layers"], len(self.file.tensors) + 1)
        for layer in range(layers):
            for ours, theirs in self.family.layer_names.items():
                shape = per_layer.get(ours, (hidden,))
                target = f"model.layers.{layer}.{theirs}"
                shapes[f"blk.{layer}.{ours}.weight"] = (f"{target}.weight", shape)
                if ours in biased:
                    shapes[f"blk.{layer}.{ours}.bias"] = (f"{target}.bias", shape[:1])
        return shapes


def llama3_divisors(scaling: dict[str, Any], base: float, head_dim: int) -> Any:
    """What Llama 3's scaling divides each rotary frequency by: (head_dim / 2,) float64.

    Formula: https://github.com/meta-llama/llama-models (apply_scaling); long waves by ``factor``, short
    ones by 1, in between smoothly.
    """
    waves = 2 * math.pi * base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / waves - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)


def interleaved_rows(num_rows: int, num_heads: int) -> Any:
    """Row order that undoes llama.cpp's: row i of the result is row ``order[i]`` of the file.

    The converter moved each head's rows from two halves (real parts, imaginary parts) to pairs.
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _layer_types(layers: int, pattern: int) -> list[str]:
    """Every ``pattern``-th layer sees everything, the others a window."""
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


def _shortest(value: float) -> float:
    """The plain decimal number behind a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
