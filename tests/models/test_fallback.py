"""Transformers' definitions under our attention: same tokens as alone, and refusals with their reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.models.attention_hook import read_rule
from headrace.models.load import LoadedModel, load_model
from tests.models.driver import Driver
from tests.models.greedy import assert_same, prompts, reference_greedy
from tests.models.tiny import FALLBACK_FAMILIES, load_reference, make_tiny

NEW_TOKENS = 8


def load(folder: Path, **more: Any) -> LoadedModel:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"), **more)


@pytest.mark.parametrize("family", FALLBACK_FAMILIES)
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    reference = load_reference(folder)
    loaded = load(folder)
    assert "Transformers" in loaded.notes[0]
    given = prompts()
    expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in given]
    for chunk in (1 << 20, 1, 7):
        rows = Driver(loaded.model, seed=chunk).generate(given, NEW_TOKENS, chunk=chunk)
        assert_same(rows, expected)


def test_two_models_at_once_keep_apart(tmp_path: Path) -> None:
    folders = [make_tiny("gpt2", tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    models = [load(folder).model for folder in folders]
    drivers = [Driver(model) for model in models]
    given = prompts()
    for folder, driver in zip(folders, drivers, strict=True):
        expected = [reference_greedy(load_reference(folder), prompt, 3) for prompt in given]
        assert_same(driver.generate(given, 3), expected)


def test_window_longer_than_the_probe_is_seen(tmp_path: Path) -> None:
    folder = make_tiny("starcoder2", tmp_path, sliding_window=40)
    given = prompts((70, 39))
    expected = [reference_greedy(load_reference(folder), prompt, 4) for prompt in given]
    assert_same(Driver(load(folder).model).generate(given, 4, chunk=16), expected)


def test_no_mask_grows_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_tiny("mixtral", tmp_path)).model

    def none_is_made(*arguments: object, **named: object) -> None:
        pytest.fail("a mask was made in service")

    for name in ("sdpa_mask", "eager_mask"):
        monkeypatch.setattr(f"transformers.masking_utils.{name}", none_is_made)
    monkeypatch.setattr("headrace.models.attention_hook.eager_mask", none_is_made)
    rows = Driver(model).generate(prompts((50,)), 2)
    assert len(rows[0].tokens) == 52


def assert_refused(folder: Path, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load(folder)
    assert caught.value.hint


def test_layers_that_bypass_the_interface_are_refused(tmp_path: Path) -> None:
    assert_refused(make_tiny("mamba", tmp_path / "mamba"), "0 calls .* in 3 layers .*linear_attention")
    # ALiBi inside its own attention
    assert_refused(make_tiny("bloom", tmp_path / "bloom"), "0 calls .* in 3 layers")
    hybrid = make_tiny("lfm2", tmp_path / "lfm2")
    assert_refused(hybrid, r"1 calls .* in 3 layers \(layers of type conv bypass it\)")


def test_chunked_attention_is_refused(tmp_path: Path) -> None:
    assert_refused(make_tiny("llama4", tmp_path), "neither causal nor a sliding window")


def test_models_that_are_no_causal_lm_are_refused(tmp_path: Path) -> None:
    for model_type, reason in (("t5", "no causal language model"), ("hal9000", "does not know this model")):
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        assert_refused(folder, reason)


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("olmoe", tmp_path)
    edit_config(folder, is_causal=False)
    assert_refused(folder, "OlmoeAttention is not causal")


def test_what_neighbours_leak_is_found_by_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.granite import modeling_granite

    layer = modeling_granite.GraniteMLP
    forward = layer.forward

    def leaking(self: Any, x: Tensor) -> Tensor:
        """Each token also sees its left neighbour in the row, whosever it is."""
        result: Tensor = forward(self, x + x.roll(1, dims=1))
        return result

    monkeypatch.setattr(layer, "forward", leaking)
    assert_refused(make_tiny("granite", tmp_path), "logits differ from its own")


def test_an_unknown_attention_argument_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.stablelm import modeling_stablelm

    layer = modeling_stablelm.StableLmAttention
    forward = layer.forward

    def tilted(self: Any, *arguments: Any, **named: Any) -> Any:
        return forward(self, *arguments, **named, tilt=0.5)

    monkeypatch.setattr(layer, "forward", tilted)
    assert_refused(make_tiny("stablelm", tmp_path), "tilt")


def test_missing_tensors_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny("gpt_neox", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CorruptFileError, match=r"missing.*dense_4h_to_h"):
        load(folder)


def test_int8_needs_our_own_definition(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="int8"):
        load(make_tiny("gpt2", tmp_path), quantization="int8")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_positions_stop_where_scaling_would_see_the_whole_batch(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    folder = make_tiny("stablelm", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    loaded = load(folder)
    assert loaded.model.config.max_position_embeddings == 64
    assert any("dynamic" in note for note in loaded.notes)


def test_mask_rules_are_read_far_beyond_the_probe() -> None:
    def causal(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k > q - 4096)

    def chunks(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k // 4096 == q // 4096)

    assert read_rule(causal, None).window is None and read_rule(causal, None).is_understood
    assert read_rule(window, 4096).window == 4096
    assert not read_rule(window, 4095).is_understood
    assert not read_rule(window, None).is_understood
    assert not read_rule(chunks, 4096).is_understood
    assert not read_rule(lambda b, h, q, k: q >= 0, None).is_understood


def test_equal_prompts_in_one_batch_stay_equal(tmp_path: Path) -> None:
    model = load(make_tiny("olmoe", tmp_path)).model
    prompt = prompts((9,))[0]
    rows = Driver(model).generate([prompt, prompt, prompt], 3, chunk=4)
    assert rows[0].tokens == rows[1].tokens == rows[2].tokens
