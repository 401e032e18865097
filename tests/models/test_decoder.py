"""Our decoder against Transformers' definition of every family: same logits, same greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.core.errors import CorruptFileError, InsufficientMemoryError, UnsupportedModelError
from headrace.kernels.table import OpTable
from headrace.models.load import LoadedModel, load_model
from tests.models.driver import Driver
from tests.models.greedy import assert_same, prompts, reference_greedy
from tests.models.tiny import FAMILIES, VOCAB, load_reference, make_tiny, randomize

NEW_TOKENS = 10


def load(folder: Path) -> LoadedModel:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    reference = load_reference(folder)
    loaded = load(folder)
    # dynamic scaling is defined by the length of a pass: see models/rope.py
    given = prompts((1, 3, 12, 20)) if family == "llama_dynamic" else prompts()
    expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in given]
    for chunk in (1 << 20, 1, 5, 16):
        rows = Driver(loaded.model, seed=chunk).generate(given, NEW_TOKENS, chunk=chunk)
        assert_same(rows, expected)


def test_dynamic_scaling_does_not_depend_on_chunks(tmp_path: Path) -> None:
    model = load(make_tiny("llama_dynamic", tmp_path)).model
    given = prompts((40, 60))
    whole = Driver(model).generate(given, 5)
    for chunk in (1, 7):
        rows = Driver(model).generate(given, 5, chunk=chunk)
        assert_same(rows, [(row.tokens, torch.stack(row.logits)) for row in whole])
    assert model.config.max_position_embeddings == 48  # 24 times the factor of 2


def test_table_is_swapped_between_steps(tmp_path: Path) -> None:
    folder = make_tiny("gemma2", tmp_path)
    loaded, given = load(folder), prompts()
    expected = [reference_greedy(load_reference(folder), prompt, 4) for prompt in given]
    calls = []

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return OpTable.reference().linear(*arguments)

    driver = Driver(loaded.model)
    rows = driver.generate(given, 2)
    loaded.model.ops = OpTable.reference().replace(linear=counted)
    for _ in range(2):
        driver.step([(row, 1) for row in rows])
        for row in rows:
            row.tokens.append(int(row.logits[-1].argmax()))
    assert [row.tokens for row in rows] == [tokens for tokens, _ in expected]
    assert calls


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bfloat16_stays_near(quantization: str, tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    reference = load_reference(folder)
    loaded = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization)
    given = prompts((7, 40))
    expected = torch.cat([reference_greedy(reference, prompt, 1)[1] for prompt in given])
    rows = Driver(loaded.model, dtype=torch.bfloat16).generate(given, 1)
    got = torch.cat([torch.stack(row.logits) for row in rows])
    # every logit moves a little, and by no more than the number format explains
    assert 0 < (got - expected).square().mean().sqrt() / expected.std() < 0.06


def test_image_model_serves_its_text_part(tmp_path: Path) -> None:
    text = json.loads((make_tiny("gemma3", tmp_path / "text") / "config.json").read_text())
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    model = transformers.Gemma3ForConditionalGeneration(config)
    randomize(model, 3)
    model.save_pretrained(tmp_path / "images")
    loaded = load(tmp_path / "images")
    assert any("images" in note for note in loaded.notes)
    reference = model.eval()
    reference.set_attn_implementation("eager")
    given = prompts()
    expected = [reference_greedy(reference, prompt, 4) for prompt in given]
    assert_same(Driver(loaded.model).generate(given, 4), expected)


def edit_weights(folder: Path, change: object) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path, metadata={"format": "pt"})


def test_shards_and_bare_names_load_alike(tmp_path: Path) -> None:
    whole = load(make_tiny("llama", tmp_path / "whole"))
    shards = make_tiny("llama", tmp_path / "shards", shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    bare = make_tiny("llama", tmp_path / "bare")

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_weights(bare, strip)
    given = prompts()
    expected = [(row.tokens, torch.stack(row.logits)) for row in Driver(whole.model).generate(given, 3)]
    for folder in (shards, bare):
        assert_same(Driver(load(folder).model).generate(given, 3), expected)


def test_tied_embeddings_share_memory_unless_two_differ(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path)
    loaded = load(folder)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert loaded.weights_bytes == stored

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(5))

    edit_weights(folder, add_head)
    given = prompts()
    expected = [reference_greedy(load_reference(folder), prompt, 3) for prompt in given]
    assert_same(Driver(load(folder).model).generate(given, 3), expected)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def broken(change: object, error: type[Exception], text: str) -> None:
        folder = make_tiny("llama", tmp_path / "broken")
        edit_weights(folder, change)
        with pytest.raises(error, match=text):
            load(folder)

    broken(lambda tensors: tensors.pop(name), CorruptFileError, f"{name} .*missing")
    broken(
        lambda tensors: tensors.update({name: torch.zeros(64, 95)}),
        CorruptFileError,
        r"shape \[64, 95\].*asks for \[64, 96\]",
    )
    broken(
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
        UnsupportedModelError,
        "q_norm",
    )
    broken(
        lambda tensors: tensors.update({name: torch.zeros(64, 96, dtype=torch.int8)}),
        UnsupportedModelError,
        f"{name} is stored as I8",
    )


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(
        make_tiny("phi3", tmp_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0
    assert len(seen) > 3


def test_memory_decides_how_weights_are_held(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    elements = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())

    def load_with(free_bytes: int, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
        return load_model(folder, dtype=dtype, device=torch.device("cpu"), free_bytes=free_bytes)

    with pytest.raises(InsufficientMemoryError, match="GiB are available") as caught:
        load_with(2 * elements - 1)
    assert "int8" in (caught.value.hint or "")
    with pytest.raises(InsufficientMemoryError):
        load_with(2 * elements + 1, torch.float32)
    tight, roomy = load_with(2 * elements), load_with(8 * elements)
    assert tight.weights_bytes <= roomy.weights_bytes
    assert any("memory is short" in note for note in tight.notes)
    assert not any("memory is short" in note for note in roomy.notes)
