"""In which forms weights are held, and that every form stands for the same model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.errors import CorruptFileError, InsufficientMemoryError
from headrace.kernels.stock import embedding_float32
from headrace.kernels.weights import PackedLinear
from headrace.models.decoder import Decoder
from headrace.models.load import LoadedModel, load_model
from headrace.models.resolve import resolve_model
from tests.models.driver import Driver
from tests.models.gguf.files import MODELS, tiny_model, write_model
from tests.models.greedy import prompts
from tests.models.tiny import make_tiny

ALL = frozenset(("bfloat16", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k"))
KINDS = {
    "attn_q.weight": gguf.GGMLQuantizationType.Q4_0,
    "attn_k.weight": gguf.GGMLQuantizationType.Q5_0,
    "attn_v.weight": gguf.GGMLQuantizationType.Q8_0,
    "attn_output.weight": gguf.GGMLQuantizationType.Q4_1,
    "ffn_gate.weight": gguf.GGMLQuantizationType.Q5_1,
    "ffn_up.weight": gguf.GGMLQuantizationType.Q4_0,
    "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
    "attn_qkv.weight": gguf.GGMLQuantizationType.Q4_0,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def quantized(tmp_path: Path, family: str) -> Path:
    path = tmp_path / f"{family}.gguf"
    return path if path.exists() else write_model(path, tiny_model(MODELS[family]), types=KINDS)


def load(
    source: Path,
    quantization: str = "auto",
    pack_formats: frozenset[str] = ALL,
    dtype: str = "bfloat16",
    free_bytes: int | None = None,
) -> LoadedModel:
    found = resolve_model(str(source), dtype=dtype, quantization=quantization)
    return load_model(
        found.folder,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
        quantization=quantization,
        pack_formats=pack_formats,
        revision=found.revision,
        free_bytes=free_bytes,
    )


def decoder(loaded: LoadedModel) -> Decoder:
    assert isinstance(loaded.model, Decoder)
    return loaded.model


def linears(loaded: LoadedModel) -> list[PackedLinear]:
    weights = decoder(loaded).weights
    found = [weights.head]
    for layer in weights.layers:
        found += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    return found


def logits(loaded: LoadedModel) -> Tensor:
    """In float32 from the embedding on, so that the weights alone decide."""
    loaded.model.ops = loaded.model.ops.replace(embedding=embedding_float32)
    vocab = loaded.model.config.vocab_size
    given = [[token % vocab for token in prompt] for prompt in prompts((3, 12, 20))]
    rows = Driver(loaded.model).generate(given, 1)
    return torch.cat([torch.stack(row.logits) for row in rows])


@pytest.mark.parametrize("family", ["llama", "llama-biased", "gemma3", "phi3", "qwen2"])
def test_blocks_are_kept_and_are_the_files_numbers(family: str, tmp_path: Path) -> None:
    source = quantized(tmp_path, family)
    kept, numbers = load(source), load(source, "none", frozenset(), "float32")
    assert "blocks" in {packed.form for packed in linears(kept)}
    assert kept.mapped_bytes > 0 and kept.form.startswith("blocks ") and numbers.form == ""
    assert any("as stored: " in note for note in kept.notes)
    for ours, theirs in zip(linears(kept), linears(numbers), strict=True):
        if "bfloat16" not in ours.formats:
            assert torch.equal(ours.dense(), theirs.dense())
        else:
            assert torch.allclose(ours.dense().float(), theirs.dense(), rtol=1 / 128)
    expected = logits(numbers)
    assert (logits(kept) - expected).abs().max() < 0.05 * expected.std()


def test_a_fused_projection_is_a_mixture(tmp_path: Path) -> None:
    kept = load(quantized(tmp_path, "llama"))
    layer = decoder(kept).weights.layers[1]
    assert layer.attention.qkv.formats == ("q4_0", "q8_0", "q8_0")  # Q5_0 is Q8_0 with small numbers
    assert layer.mlp.gate_up.formats == ("bfloat16", "q4_0")  # Q5_1 is nothing that kernels read
    assert layer.attention.out.formats == ("q4_1",)
    assert (layer.mlp.down.form, layer.mlp.down.formats) == ("plain", ("bfloat16",))
    head = decoder(kept).weights.head
    assert head.form == "blocks" and kept.weights_bytes < 1.05 * sum(
        packed.nbytes for packed in linears(kept)
    )  # embedding and head are one
    assert all(
        packed.weight.data_ptr() % 64 == 0
        for packed in linears(kept)
        if packed.form == "blocks" and packed.weight is not None
    )
    kept.release()  # views stay valid
    assert torch.isfinite(layer.attention.qkv.dense()).all()


def test_formats_that_no_kernel_reads_become_numbers(tmp_path: Path) -> None:
    source = quantized(tmp_path, "llama")
    some = load(source, pack_formats=frozenset(("bfloat16", "q8_0", "q4_0")))
    assert {packed.form for packed in linears(some)} == {"blocks", "plain"}
    assert decoder(some).weights.layers[0].attention.out.form == "plain"
    assert some.form == "blocks bfloat16+q4_0+q8_0" != load(source).form
    expected = logits(load(source))
    assert (logits(some) - expected).abs().max() < 0.05 * expected.std()


def test_without_a_pack_blocks_become_what_they_would_have_been(tmp_path: Path) -> None:
    source = quantized(tmp_path, "llama")
    for quantization in ("auto", "none"):
        plain = load(source, "none", frozenset())
        other = load(source, quantization, frozenset())
        assert other.form == "" and other.mapped_bytes == 0
        assert [packed.form for packed in linears(other)] == [packed.form for packed in linears(plain)]
        for one, two in zip(linears(plain), linears(other), strict=True):
            assert torch.equal(one.dense(), two.dense())
    assert load(source, "none").form == "" and load(source, "none").mapped_bytes > 0


def test_a_file_without_quantized_weights_has_one_folder(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", tiny_model(MODELS["llama"]))
    first = resolve_model(str(source), quantization="auto").folder
    assert first == resolve_model(str(source), quantization="none").folder
    assert first.name.endswith("-bfloat16-v1") and len(list(first.parent.iterdir())) == 1
    quant = quantized(tmp_path, "llama")
    names = {resolve_model(str(quant), quantization=q).folder.name for q in ("auto", "int8", "none")}
    assert len(names) == 2 and any(name.endswith("-blocks-v1") for name in names)
    assert resolve_model(str(quant), dtype="float32", quantization="auto").folder.name.endswith("float32-v1")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_int8_makes_blocks_of_any_checkpoint(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "hf")
    made, plain = load(folder, "int8"), load(folder, "none", frozenset(), "float32")
    assert {name for packed in linears(made) for name in packed.formats} == {"q8_0"}
    assert made.form == "int8 blocks"
    for ours, theirs in zip(linears(made), linears(plain), strict=True):
        exact = theirs.dense()
        groups = exact.view(len(exact), -1, 32).abs().amax(-1, keepdim=True) / 127
        off = (ours.dense() - exact).view(len(exact), -1, 32).abs()
        assert bool((off <= 0.51 * groups + exact.abs().max() * 2**-8).all())
    expected = logits(plain)
    assert (logits(made) - expected).square().mean().sqrt() < 0.1 * expected.std()
    stock = load(folder, "int8", frozenset(("bfloat16",)))
    assert stock.form == "int8" and "int8" in {packed.form for packed in linears(stock)}


def test_int8_keeps_what_is_int8(tmp_path: Path) -> None:
    source = quantized(tmp_path, "llama")
    made, kept = load(source, "int8"), load(source)
    assert {packed.formats for packed in linears(made)} <= {("q8_0",), ("q8_0",) * 2, ("q8_0",) * 3}
    head, stored = linears(made)[0], linears(kept)[0]
    assert head.weight is not None and stored.weight is not None and torch.equal(head.weight, stored.weight)
    assert made.mapped_bytes == head.nbytes


def test_plain_weights_stay_in_the_file_where_a_pack_has_its_own_form(tmp_path: Path) -> None:
    model = tiny_model(MODELS["llama-biased"]).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    mapped, own = load(tmp_path / "hf", "auto"), load(tmp_path / "hf", "auto", frozenset())
    assert {packed.form for packed in linears(mapped)} == {"plain", "parts"} and mapped.form == own.form == ""
    assert mapped.mapped_bytes > 0.95 * mapped.weights_bytes and own.mapped_bytes == 0
    assert mapped.weights_bytes < own.weights_bytes  # no second copy for few rows
    for one, two in zip(linears(mapped), linears(own), strict=True):
        if two.form != "half":
            assert torch.equal(one.dense(), two.dense())
    expected = logits(own)
    assert (logits(mapped) - expected).abs().max() < 0.05 * expected.std()


def test_damaged_blocks_are_refused(tmp_path: Path) -> None:
    folder = resolve_model(str(quantized(tmp_path, "llama")), quantization="auto").folder
    path = folder / "model.safetensors"
    body = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(body[:8], "little")
    assert start % 64 == 0
    for place, value in ((0, 9), (8, 77), (16, 1 << 40), (24, 3), (24, 1 << 40)):
        damaged = bytearray(body)
        damaged[start + place : start + place + 8] = np.int64(value).tobytes()
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match="the blocks of"):
            load_model(
                folder,
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
                quantization="auto",
                pack_formats=ALL,
                free_bytes=1 << 40,
            )


def test_memory_is_that_of_the_form(tmp_path: Path) -> None:
    source = quantized(tmp_path, "qwen2")
    kept = load(source)
    numbers = 2 * sum(packed.in_features * packed.out_features for packed in linears(kept))
    assert kept.weights_bytes < numbers
    assert load(source, free_bytes=numbers).form == kept.form
    for quantization, formats in (("none", ALL), ("auto", frozenset())):
        with pytest.raises(InsufficientMemoryError, match="bfloat16"):
            load(source, quantization, formats, free_bytes=numbers)
    with pytest.raises(InsufficientMemoryError):
        load(source, free_bytes=kept.weights_bytes // 2)
