"""Checkpoints as they arrive: whole, half, damaged and hostile."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.core.errors import CorruptFileError, HeadraceError, ModelNotFoundError, UnsupportedModelError
from headrace.models.safetensors_file import SafetensorsFile
from headrace.models.weights import Checkpoint, weights_revision
from tests.models.tiny import make_tiny

CPU = torch.device("cpu")


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(body) if length is None else length).to_bytes(8, "little") + body + data)
    return path


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{index}": torch.randn(3, 5, generator=generator).to(dtype)
        for index, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.float64))
    }
    tensors["empty"] = torch.empty(0, 4)
    tensors["scalar"] = torch.tensor(2.5)
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(file.get(name), tensor)
        assert file.get(name).dtype == tensor.dtype
    file.release()
    assert torch.equal(file.get("t0"), tensors["t0"])


def test_reads_unaligned_tensors(tmp_path: Path) -> None:
    data = torch.arange(4, dtype=torch.float32)
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]}
    header = json.dumps({"x": entry})
    header += " " * (-len(header) % 8)
    path = write_raw(tmp_path / "a.safetensors", header.encode(), b"\0" + data.numpy().tobytes())
    assert torch.equal(SafetensorsFile(path).get("x"), data)


def f32(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "seven bytes": lambda path: path.write_bytes(b"1234567"),
    "giant header": lambda path: write_raw(path, {}, length=2**63),
    "header beyond the file": lambda path: write_raw(path, {}, length=3),
    "no JSON": lambda path: write_raw(path, b"\xff\xfe{"),
    "nested JSON": lambda path: write_raw(path, b"[" * 100_000),
    "a list": lambda path: write_raw(path, []),
    "entry is no object": lambda path: write_raw(path, {"x": 3}),
    "no dtype": lambda path: write_raw(path, {"x": {"shape": [1], "data_offsets": [0, 4]}}),
    "giant shape": lambda path: write_raw(path, {"x": f32([2**62, 2**62], 0, 4)}, bytes(4)),
    "negative shape": lambda path: write_raw(path, {"x": f32([-1], 0, 4)}, bytes(4)),
    "shape of floats": lambda path: write_raw(path, {"x": {**f32([], 0, 4), "shape": [1.0]}}, bytes(4)),
    "many dimensions": lambda path: write_raw(path, {"x": f32([1] * 99, 0, 4)}, bytes(4)),
    "giant offsets": lambda path: write_raw(path, {"x": f32([2**40], 0, 2**42)}, bytes(4)),
    "offsets beyond 64 bits": lambda path: write_raw(path, {"x": f32([1], 2**80, 2**80 + 4)}, bytes(4)),
    "negative offsets": lambda path: write_raw(path, {"x": f32([1], -4, 0)}, bytes(4)),
    "reversed offsets": lambda path: write_raw(path, {"x": f32([1], 4, 0)}, bytes(4)),
    "one offset": lambda path: write_raw(path, {"x": {**f32([1], 0, 4), "data_offsets": [0]}}, bytes(4)),
    "size and shape differ": lambda path: write_raw(path, {"x": f32([2], 0, 4)}, bytes(4)),
    "overlap": lambda path: write_raw(path, {"x": f32([2], 0, 8), "y": f32([2], 4, 12)}, bytes(12)),
    "more than its tensors": lambda path: write_raw(path, {"x": f32([1], 0, 4)}, bytes(5)),
    "truncated": lambda path: write_raw(path, {"x": f32([1000], 0, 4000)}, bytes(3999)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused_without_much_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    HOSTILE[kind](path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptFileError, match=r"model\.safetensors") as caught:
        Checkpoint(tmp_path)
    assert caught.value.hint
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_crashes_the_reader(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({"a": torch.ones(3, 4), "b": torch.zeros(5)}, path)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 6))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        try:
            file = SafetensorsFile(path)
            for name in file.entries:
                file.get(name)
        except HeadraceError:
            pass


def test_half_downloaded_folders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="not a folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.incomplete").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="half downloaded"):
        Checkpoint(tmp_path)

    shards = make_tiny("llama", tmp_path / "shards", shard_size="60KB")
    first = min(shards.glob("model-*.safetensors"))
    first.rename(shards / f"{first.name}.incomplete")
    with pytest.raises(ModelNotFoundError, match=f"weight files are missing.*{first.name}") as caught:
        Checkpoint(shards)
    assert caught.value.hint
    (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelNotFoundError):
        Checkpoint(shards)


def test_weights_in_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="pytorch_model"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin"])
def test_an_index_cannot_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    index = {"weight_map": {"x": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match="beside it"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_damaged_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"index\.json"):
        Checkpoint(tmp_path)


def test_float8_tensors_are_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"x": f32([4], 0, 4, dtype="F8_E4M3")}, bytes(4))
    with pytest.raises(UnsupportedModelError, match="F8_E4M3"):
        Checkpoint(tmp_path).take("x", (4,))


def test_joins_and_converts(tmp_path: Path) -> None:
    a, b = torch.ones(2, 3), torch.zeros(1, 3, dtype=torch.float16)
    save_file({"a": a, "b": b}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    joined = checkpoint.join([("a", (2, 3)), ("b", (1, 3))], torch.bfloat16, CPU)
    assert joined.dtype == torch.bfloat16
    assert torch.equal(joined.float(), torch.cat([a, b.float()]))
    own = checkpoint.copy("a", (2, 3), torch.float32, CPU)
    own.zero_()
    assert torch.equal(checkpoint.take("a", (2, 3)), a)
    checkpoint.finish()


def test_revision_names_the_weights(tmp_path: Path) -> None:
    def revision(folder: Path) -> str:
        return weights_revision(folder, Checkpoint(folder).files)

    folder = make_tiny("llama", tmp_path / "a")
    same = make_tiny("llama", tmp_path / "b")
    other = make_tiny("llama", tmp_path / "c", seed=1)
    assert revision(folder) == revision(same) != revision(other)
    # one tensor fine-tuned, everything else alike
    tensors = load_file(same / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.weight"] += 1e-3
    save_file(tensors, same / "model.safetensors", metadata={"format": "pt"})
    assert revision(folder) != revision(same)
    config = json.loads((folder / "config.json").read_text())
    before = revision(folder)
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert revision(folder) != before
