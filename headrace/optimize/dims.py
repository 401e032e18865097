"""A model's own dimensions as each op sees them: what a target fixes beside the shapes of its calls.

``dims`` holds the op's ints of signature.py but ``num_decodes``, and its sizes:

    linear, gated_linear, logits_head   in_features, out_features (a gated pair's: of one half)
    mlp_block                           hidden_size, intermediate_size
    rms_norm                            size
    rope                                num_heads, head_dim, rotary_dim
    activation_and_mul                  intermediate_size
    attention                           num_heads, num_kv_heads, head_dim, v_head_dim
    attention_block                     hidden_size, rotary_dim
    decoder_layer                       hidden_size, intermediate_size, rotary_dim

``window`` is 0 unless every layer has the same one; ``max_window`` is the widest where layers differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.native.signature import ACTIVATIONS, SIGNATURES
from headrace.models.config import DecoderConfig
from headrace.optimize.records import Phase

LINEARS = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class OpDims:
    """``present``: the optional slots that this model's calls fill; ``layers``: weight sets in one step."""

    dims: dict[str, int]
    floats: dict[str, float]
    present: list[str]
    layers: int


def op_dims(op: str, config: DecoderConfig, *, phase: Phase, block_size: int, part: str = "") -> OpDims:
    """``part`` tells apart an op's several uses: one of LINEARS for ``linear``; others need none."""
    signature = SIGNATURES[op]
    known = _sizes(config, block_size)
    names = [name for name in signature.ints if name != "num_decodes"]
    dims = {name: known[name] for name in names} | _op_sizes(op, config, known, part)
    if "window" in dims:
        windows = {window or 0 for window in config.sliding_windows}
        dims["window"] = windows.pop() if len(windows) == 1 else 0
        if windows:
            dims["max_window"] = max(window or 0 for window in config.sliding_windows)
    values = _floats(config)
    if op == "logits_head":
        values["softcap"] = config.final_softcap or 0.0
    floats = {name: values[name] for name in signature.floats}
    return OpDims(
        dims=dims,
        floats=floats,
        present=[name for name in _present(op, config, phase, part) if name in signature.names()],
        layers=1 if op == "logits_head" else config.num_layers,
    )


def _sizes(config: DecoderConfig, block_size: int) -> dict[str, int]:
    return {
        "block_size": block_size,
        "window": 0,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "v_head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "rotary_dim": config.ropes[0].rotary_dim,
        "qk_norm_full": int(config.qk_norm == "projection"),
        "activation": ACTIVATIONS.index(config.activation),
    }


def _op_sizes(op: str, config: DecoderConfig, known: dict[str, int], part: str) -> dict[str, int]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    if op == "linear":
        features = {
            "qkv": (hidden, (heads + 2 * kv_heads) * width),
            "out": (heads * width, hidden),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
        }
        return dict(zip(("in_features", "out_features"), features[part], strict=True))
    if op == "gated_linear":
        return {"in_features": hidden, "out_features": inner}
    if op == "logits_head":
        return {"in_features": hidden, "out_features": config.vocab_size}
    if op == "rms_norm":
        return {"size": hidden}
    names = {
        "rope": ("num_heads", "head_dim", "rotary_dim"),
        "activation_and_mul": ("intermediate_size",),
        "attention": ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
        "attention_block": ("hidden_size", "rotary_dim"),
        "mlp_block": ("hidden_size", "intermediate_size"),
        "decoder_layer": ("hidden_size", "intermediate_size", "rotary_dim"),
    }[op]
    sizes = {name: known[name] for name in names}
    if op == "rope" and config.qk_norm == "none":
        sizes["num_heads"] += kv_heads  # queries and keys are turned in one go
    return sizes


def _floats(config: DecoderConfig) -> dict[str, float]:
    offset = 0.0  # a weight that is meant as 1 + weight is stored with the 1 in it
    normed = config.qk_norm != "none"
    return {
        "eps": config.norm_eps,
        "offset": offset,
        "norm_eps": config.norm_eps,
        "norm_offset": offset,
        "qk_norm_eps": config.norm_eps if normed else 0.0,
        "qk_norm_offset": offset if normed else 0.0,
        "scale": config.attention_scale,
        "softcap": config.attention_softcap or 0.0,
    }


def _present(op: str, config: DecoderConfig, phase: Phase, part: str) -> list[str]:
    placement = config.norm_placement
    found = {
        "input_norm": placement != "post",
        "pre_mlp_norm": placement != "post",
        "post_attention_norm": placement != "pre",
        "post_mlp_norm": placement != "pre",
        "qkv_bias": config.qkv_bias,
        "o_bias": config.out_bias,
        "gate_up_bias": config.mlp_bias,
        "down_bias": config.mlp_bias,
        "q_norm": config.qk_norm != "none",
        "k_norm": config.qk_norm != "none",
        "chunks": phase == "prefill",
        "chunk_tables": phase == "prefill",
        # a block adds the residual itself where no norm stands between
        "residual": placement == "pre" and (op != "linear" or part in ("out", "down")),
    }
    if op == "linear":
        biases = {
            "qkv": config.qkv_bias,
            "out": config.out_bias,
            "gate_up": config.mlp_bias,
            "down": config.mlp_bias,
        }
        found["bias"] = biases[part]
    if op == "gated_linear":
        found["bias"] = config.mlp_bias
    return [name for name, there in found.items() if there]
