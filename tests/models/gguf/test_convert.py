from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
import torch

from headrace.core.errors import CorruptFileError, ModelNotFoundError, StartupError, UnsupportedModelError
from headrace.models import cache
from headrace.models.gguf import safetensors_plan
from headrace.models.gguf.convert import converted_folder
from tests.models.gguf.files import BASE, MODELS, converted_tensors, tiny_model, write_model

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "headrace.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", tiny_model(MODELS["llama"]))


def left_over(cache_home: Path) -> list[str]:
    return [path.name for path in (cache_home / "converted").iterdir() if ".partial" in path.name]


def test_the_folder_holds_all_that_its_readers_need(source: Path, cache_home: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    folder = converted_folder(source, dtype="bfloat16", progress=lambda *call: calls.append(call))
    assert {path.name for path in folder.iterdir()} == FILES
    assert folder.parent == cache_home / "converted" and not left_over(cache_home)
    record = json.loads((folder / "headrace.json").read_text())
    assert folder.name == record["revision"] == f"{record['sha256']}-bfloat16-v{record['converter_version']}"
    assert record["source"] == str(source)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    what, done, total = calls[-1]
    assert what == "converting the model" and done == total == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights_equal_the_gguf_package(dtype: str, tmp_path: Path) -> None:
    model = tiny_model(BASE | MODELS["llama"])
    kinds = {
        "attn_q.weight": gguf.GGMLQuantizationType.Q8_0,
        "attn_k.weight": gguf.GGMLQuantizationType.Q4_1,
        "ffn_up.weight": gguf.GGMLQuantizationType.Q5_0,
        "token_embd.weight": gguf.GGMLQuantizationType.Q4_0,
        "ffn_down.weight": gguf.GGMLQuantizationType.BF16,
    }
    folder = converted_folder(write_model(tmp_path / "m.gguf", model, types=kinds), dtype=dtype)
    tensors = converted_tensors(model, "llama")
    expected = {
        "model.embed_tokens.weight": ("token_embd.weight", 0),
        "model.layers.1.self_attn.q_proj.weight": ("blk.1.attn_q.weight", 4),
        "model.layers.1.self_attn.k_proj.weight": ("blk.1.attn_k.weight", 2),
        "model.layers.2.mlp.up_proj.weight": ("blk.2.ffn_up.weight", 0),
        "model.layers.2.mlp.down_proj.weight": ("blk.2.ffn_down.weight", 0),
    }
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        for name, (theirs, heads) in expected.items():
            kind = next(kind for end, kind in kinds.items() if theirs.endswith(end))
            values = gguf.quants.dequantize(gguf.quants.quantize(tensors[theirs], kind), kind)
            if heads:
                rows, columns = values.shape
                values = (
                    values.reshape(heads, rows // heads // 2, 2, columns)
                    .swapaxes(1, 2)
                    .reshape(rows, columns)
                )
            want = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))
            assert torch.equal(file.get_tensor(name), want), name


def test_large_tensors_are_converted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes whatever the size of a piece, and memory that follows the piece."""
    source = write_model(
        tmp_path / "m.gguf", tiny_model(MODELS["llama"] | {"intermediate_size": 4096, "hidden_size": 256})
    )
    whole = (converted_folder(source, dtype="float32") / "model.safetensors").read_bytes()
    monkeypatch.setattr(safetensors_plan, "_CHUNK_ELEMENTS", 1 << 12)
    shutil.rmtree(tmp_path / "cache")
    tracemalloc.start()
    try:
        folder = converted_folder(source, dtype="float32")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (folder / "model.safetensors").read_bytes() == whole
    assert peak < len(whole) / 4


def test_a_warm_start_reads_nothing_of_the_file(
    source: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted_folder(source, dtype="bfloat16")

    def no_hash(*_: Any) -> Any:
        raise AssertionError("the file was hashed again")

    monkeypatch.setattr(cache.hashlib, "sha256", lambda data=None: no_hash() if data is None else real(data))
    assert converted_folder(source, dtype="bfloat16") == folder
    os.utime(source, ns=(1, 1))
    with pytest.raises(AssertionError):
        converted_folder(source, dtype="bfloat16")


real = cache.hashlib.sha256


def test_the_same_bytes_under_another_name_share_a_folder_and_dtypes_do_not(
    source: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(source, copy)
    folder = converted_folder(source, dtype="bfloat16")
    assert converted_folder(copy, dtype="bfloat16") == folder
    assert converted_folder(source, dtype="float32") != folder


def test_leftovers_and_damaged_folders_are_replaced(source: Path, cache_home: Path) -> None:
    folder = converted_folder(source, dtype="bfloat16")
    good = (folder / "model.safetensors").read_bytes()
    killed = folder.with_name(f".{folder.name}.partial-killed")
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    (folder / "model.safetensors").write_bytes(good[:100])
    again = converted_folder(source, dtype="bfloat16")
    assert again == folder and (folder / "model.safetensors").read_bytes() == good
    assert not left_over(cache_home)


def test_a_failing_conversion_leaves_nothing(
    source: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_plan.os, "pwrite", full)
    with pytest.raises(StartupError, match="No space left") as caught:
        converted_folder(source, dtype="bfloat16")
    assert "XDG_CACHE_HOME" in str(caught.value.hint)
    assert list((cache_home / "converted").iterdir()) == []


def test_too_small_a_disk_is_noticed_before_writing(
    source: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StartupError, match="GB are needed in"):
        converted_folder(source, dtype="bfloat16")


CONVERT_ON_GO = """
import sys
from pathlib import Path
from headrace.models.gguf.convert import converted_folder
print("ready", flush=True)
sys.stdin.readline()
print(converted_folder(Path(sys.argv[1]), dtype="bfloat16"))
"""


def test_two_processes_at_once_both_end_well(source: Path, cache_home: Path) -> None:
    command = [sys.executable, "-c", CONVERT_ON_GO, str(source)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    folders = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert len(folders) == 1 and {path.name for path in Path(folders.pop()).iterdir()} == FILES
    assert not left_over(cache_home)


def test_bad_files_are_refused_and_leave_nothing(source: Path, tmp_path: Path, cache_home: Path) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(source.read_bytes()[:-1])
    text = tmp_path / "text.gguf"
    text.write_text("not found")
    for path, error in [
        (half, CorruptFileError),
        (text, CorruptFileError),
        (tmp_path / "no.gguf", ModelNotFoundError),
    ]:
        with pytest.raises(error, match=str(path)):
            converted_folder(path, dtype="bfloat16")
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        converted_folder(tmp_path / "bert.gguf", dtype="bfloat16")
    assert not (cache_home / "converted").exists() or not any((cache_home / "converted").iterdir())
