from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.models.gguf.config import map_model
from headrace.models.gguf.convert import converted_folder
from headrace.models.gguf.reader import read_gguf
from tests.models.gguf.files import MODELS, llama3_freqs, tiny_model, write_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).remainder(model.config.vocab_size)[None]
    with torch.no_grad():
        return model(tokens).logits


def through_gguf(tmp_path: Path, model: Any, extra: Any = None) -> Any:
    """The model after a trip through a GGUF file and our converter."""
    path = write_model(tmp_path / "model.gguf", model, extra=extra)
    folder = converted_folder(path, dtype="float32")
    # Also what a strict reader of the folder sees: no key too many, none missing.
    back, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return back.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = tiny_model(MODELS[name])
    back = through_gguf(tmp_path, model)
    assert type(back) is type(model)
    tolerance = 2e-7 if name.startswith("gemma") else 0.0  # (w + 1) - 1 in float32
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back.state_dict()[key], value, rtol=0, atol=tolerance, msg=key)
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=2e-4 if tolerance else 0.0)


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHORT = [1.0 + i / 8 for i in range(8)]
LONG = [2.0 + i for i in range(8)]


def llama3(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", llama3_freqs(LLAMA3, 500000.0, 16))


def longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_tensor("rope_factors_short.weight", np.array(SHORT, np.float32))
    writer.add_tensor("rope_factors_long.weight", np.array(LONG, np.float32))


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        (
            {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0},
            },
            linear,
        ),
        (
            {
                "model_type": "qwen2",
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 5e3,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            yarn,
        ),
        ({"model_type": "llama", "rope_parameters": LLAMA3, "max_position_embeddings": 131072}, llama3),
        (
            {
                "model_type": "phi3",
                "original_max_position_embeddings": 16,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 5e3,
                    "short_factor": SHORT,
                    "long_factor": LONG,
                },
            },
            longrope,
        ),
        (
            MODELS["gemma3"]
            | {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                }
            },
            linear,
        ),
    ],
    ids=["linear", "yarn", "llama3", "longrope", "gemma3-linear"],
)
def test_rope_scaling_survives(options: dict[str, Any], extra: Any, tmp_path: Path) -> None:
    model = tiny_model(options)
    back = through_gguf(tmp_path, model, extra)
    plain = tiny_model(options | {"rope_parameters": None})
    assert not torch.allclose(logits(plain), logits(model), atol=1e-3), "the scaling changes nothing here"
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=2e-4)


def test_unexplained_rope_factors_are_refused(tmp_path: Path) -> None:
    def odd(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8).astype(np.float32))

    path = write_model(tmp_path / "m.gguf", tiny_model(MODELS["llama"]), extra=odd)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        map_model(read_gguf(path))


def test_gemma3_layers_windows_and_thetas(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model(MODELS["gemma3"]))
    config = map_model(read_gguf(path)).config
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["rope_theta"], config["rope_local_base_freq"], config["sliding_window"]) == (
        1e6,
        10000.0,
        8,
    )
    assert (config["query_pre_attn_scalar"], config["tie_word_embeddings"]) == (32, True)
    assert config["rms_norm_eps"] == 1e-6
    json.dumps(config, allow_nan=False)


def written(tmp_path: Path, architecture: str, **values: Any) -> Path:
    """A file with metadata alone."""
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", architecture)
    for key, value in values.items():
        writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "bare.gguf"


def test_an_unknown_architecture_is_named_with_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3, gemma2, gemma3, phi3, olmo2"
    ):
        map_model(read_gguf(written(tmp_path, "mamba")))


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="experts"):
        map_model(read_gguf(written(tmp_path, "llama", expert_count=8)))


def test_missing_metadata_says_which(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"llama\.attention\.head_count must be an integer.*none"):
        map_model(read_gguf(written(tmp_path, "llama")))


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model(MODELS["llama"]))
    file = read_gguf(path)
    lost = file.tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(CorruptFileError, match=r"blk\.1\.ffn_up\.weight is missing"):
        map_model(file)
    file.tensors["blk.1.ffn_up.weight"] = file.tensors["blk.1.ffn_down.weight"]
    with pytest.raises(CorruptFileError, match=r"needs the shape \[96, 64\], it has \[64, 96\]"):
        map_model(file)
    file.tensors["blk.1.ffn_up.weight"] = lost
    file.tensors["blk.1.ssm_a"] = lost
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ssm_a"):
        map_model(file)


def test_an_absurd_block_count_costs_nothing(tmp_path: Path) -> None:
    file = read_gguf(write_model(tmp_path / "m.gguf", tiny_model(MODELS["llama"])))
    file.metadata["llama.block_count"] = 2**31 - 1
    with pytest.raises(CorruptFileError, match=r"blk\.3\.attn_norm\.weight is missing"):
        map_model(file)
