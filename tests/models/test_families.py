"""config.json as it is found in the wild: today's and yesterday's notation, defaults, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.models.families import covers, read_config
from headrace.models.load import load_model
from headrace.models.rope import inverse_frequencies
from tests.models.tiny import make_tiny

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
TYPES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
}


@pytest.mark.parametrize("model_type", TYPES)
def test_absent_fields_mean_what_transformers_means(model_type: str) -> None:
    """A config with nothing but its type equals the one Transformers fills in and writes out."""
    stated = getattr(transformers, TYPES[model_type])().to_dict()
    full, bare = read_config(stated), read_config({"model_type": model_type})
    assert replace(full, notes=()) == replace(bare, notes=())


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"rope_type": "linear", "factor": 4.0}, "linear"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "yarn"),
        ({"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "truncate": False}, "yarn"),
        ({"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}, "yarn"),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "llama3",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
    ],
)
def test_frequencies_equal_transformers(params: dict[str, Any], name: str) -> None:
    size = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 131072}
    config = transformers.LlamaConfig(**size, rope_parameters={"rope_theta": 500_000.0, **params})
    expected, factor = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"))
    spec = read_config({**LLAMA, **size, "rope_theta": 500_000.0, "rope_scaling": params}).ropes[0]
    torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(factor)


def test_old_and_new_notation_of_rope_agree() -> None:
    params = {"type": "linear", "factor": 2.0}
    old = read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": params})
    new = read_config({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert old == new
    gemma = {"model_type": "gemma3_text", "head_dim": 128}
    old = read_config(
        {
            **gemma,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    new = read_config(
        {
            **gemma,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == new
    assert [rope.kind for rope in new.ropes] == ["linear", "default"]
    assert new.layer_ropes[:6] == (1, 1, 1, 1, 1, 0)


def test_windows_follow_the_family() -> None:
    def windows(model_type: str, **fields: Any) -> tuple[int | None, ...]:
        return read_config({"model_type": model_type, "num_hidden_layers": 4, **fields}).sliding_windows

    assert windows("mistral") == (4096,) * 4
    assert windows("mistral", sliding_window=None) == (None,) * 4
    assert windows("qwen2", sliding_window=64, use_sliding_window=False) == (None,) * 4
    assert windows("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3) == (
        None,
        None,
        None,
        64,
    )
    assert windows("gemma2", sliding_window=64) == (64, None, 64, None)
    assert windows("gemma3_text", sliding_window=64, sliding_window_pattern=2) == (64, None, 64, None)
    assert windows("phi3", sliding_window=64) == (64,) * 4


def test_lengths_follow_the_rope() -> None:
    def served(**fields: Any) -> int:
        return read_config({**LLAMA, "max_position_embeddings": 4096, **fields}).max_position_embeddings

    assert served() == 4096
    assert served(rope_scaling={"type": "dynamic", "factor": 4.0}) == 16384
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert served(rope_scaling=yarn) == 16384
    assert served(max_position_embeddings=16384, rope_scaling=yarn) == 16384


def test_longrope_is_served_where_its_short_factors_hold(tmp_path: Path) -> None:
    folder = make_tiny("phi3_long", tmp_path)
    loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.model.config.max_position_embeddings == 256
    assert any("longrope" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_act": "relu2"}, "relu2"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}, "mrope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"attention_multiplier": 0.01}, "attention_multiplier"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized"),
    ],
)
def test_what_would_change_numbers_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        read_config({**LLAMA, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_wrong_types_are_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptFileError, match=reason):
        read_config({**LLAMA, **fields})


def test_leftovers_are_noted_and_neutral_ones_are_not() -> None:
    config = read_config({**LLAMA, "unsloth_fixed": True, "use_cache": True, "sliding_window": None})
    assert len(config.notes) == 1
    assert "unsloth_fixed" in config.notes[0]
    assert "use_cache" not in config.notes[0]


def test_covers_only_its_families() -> None:
    assert covers({"model_type": "qwen3"})
    assert not covers({"model_type": "mixtral"})
    assert not covers({"model_type": ["llama"]})
    assert not covers({})


def test_eos_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)

    def eos() -> list[int]:
        return load_model(folder, dtype=torch.float32, device=torch.device("cpu")).eos_token_ids

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert eos() == [5, 7]
    (folder / "generation_config.json").write_text("{}")
    assert eos() == [1]
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    assert eos() == []
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": "end"}))
    with pytest.raises(CorruptFileError, match="eos_token_id"):
        eos()
