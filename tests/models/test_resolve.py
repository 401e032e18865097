from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
import torch
from huggingface_hub import errors
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.core.errors import (
    CorruptFileError,
    HeadraceError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from headrace.models.cache import cache_folder
from headrace.models.resolve import resolve_model
from tests.models.gguf.files import MODELS, tiny_model, write_model


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with two shards."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    weights = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
    for file, name in weights.items():
        safetensors.numpy.save_file({name: np.ones(64, np.float32)}, path / file)
    index = {"weight_map": {name: file for file, name in weights.items()}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


# folders


def test_a_complete_folder_is_taken_as_it_is(folder: Path) -> None:
    found = resolve_model(str(folder))
    assert (found.folder, found.name) == (folder, str(folder))
    assert found.revision == "", "the engine takes the digest of what it loads"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lie(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda p: (p / "config.json").unlink(), ModelNotFoundError, r"holds no config\.json"),
        (lambda p: (p / "config.json").write_text("{"), CorruptFileError, "cannot be read as JSON"),
        (lambda p: (p / "config.json").write_text("[]"), CorruptFileError, "an object is needed"),
        (
            lambda p: (p / "model-00002-of-00002.safetensors").unlink(),
            ModelNotFoundError,
            "1 of 2 weight files are missing, among them model-00002-of-00002.safetensors",
        ),
        (
            lambda p: truncate(p / "model-00002-of-00002.safetensors"),
            CorruptFileError,
            r"ends at byte \d+ of \d+",
        ),
        (
            lambda p: lie(p / "model-00001-of-00002.safetensors"),
            CorruptFileError,
            "header claims 4611686018427387904",
        ),
        (lambda p: (p / "model-00001-of-00002.safetensors").write_bytes(b""), CorruptFileError, "header"),
        (
            lambda p: (p / "model.safetensors.index.json").write_text("{}"),
            CorruptFileError,
            "names no weight files",
        ),
        (
            lambda p: (p / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../a.safetensors"}}'
            ),
            CorruptFileError,
            "a safetensors file beside it is needed",
        ),
        (
            lambda p: (p / "model.safetensors.index.json").unlink(),
            ModelNotFoundError,
            r"but no model\.safetensors\.index\.json",
        ),
    ],
)
def test_half_downloaded_and_damaged_folders(
    damage: Any, error: type[HeadraceError], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        resolve_model(str(folder))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"holds no model\.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin; safetensors are needed"):
        resolve_model(str(tmp_path))


# GGUF


@pytest.mark.usefixtures("own_cache")
def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    source = write_model(tmp_path / "g" / "m.gguf", tiny_model(MODELS["llama"]))
    found = resolve_model(str(source), dtype="float32")
    assert found.folder.parent == cache_folder() / "converted"
    assert found.revision == found.folder.name and found.revision.endswith("-float32-v1")
    assert resolve_model(str(tmp_path / "g"), dtype="float32").folder == found.folder
    source.with_name("n.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF models: m\.gguf, n\.gguf"):
        resolve_model(str(tmp_path / "g"))


@pytest.mark.usefixtures("own_cache")
def test_dtype_auto_is_bfloat16_and_others_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", tiny_model(MODELS["llama"]))
    assert resolve_model(str(source), dtype="auto").revision.endswith("-bfloat16-v1")
    with pytest.raises(UsageError, match="float16"):
        resolve_model(str(source), dtype="float16")


# names that lead nowhere


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("smollm2-135", "no model 'smollm2-135'.*hub id", "Did you mean smollm2-135m?"),
        ("zzz", "tried short names, folder or file", "Short names are smollm2-135m, gemma-3-270m"),
        ("./no/such/folder", "folder or file", "Short names"),
        ("/no/such.gguf", "folder or file /no/such.gguf", "Short names"),
        ("a/b/c/d", "hub id", "Short names"),
        ("", "no model ''", "Short names"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_was_tried(name: str, message: str, hint: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve_model(name)
    assert hint in str(caught.value.hint)


def test_some_other_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"neither a folder nor a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


# the hub


def bare(kind: type[Exception], text: str = "no") -> Exception:
    """An error of huggingface_hub without the HTTP response that its constructor wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (bare(errors.GatedRepoError), "gated", "Accept its terms"),
        (bare(errors.RepositoryNotFoundError), "no model org/name", "HF_TOKEN"),
        (bare(errors.RevisionNotFoundError), "no revision", "None"),
        (bare(errors.LocalEntryNotFoundError), "cannot be reached", "Check the network"),
        (bare(errors.OfflineModeIsEnabled), "not in the local cache", ""),
        (bare(errors.HfHubHTTPError, "503 busy"), "failed: 503 busy", "HF_TOKEN"),
        (ConnectionError("reset"), "failed: reset", "network"),
    ],
)
def test_the_hub_refusals_are_told_apart(
    error: Exception, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve_model("org/name")
    assert hint in str(caught.value.hint)


def test_offline_names_the_switch(tmp_path: Path) -> None:
    code = "from headrace.models.resolve import resolve_model; resolve_model('org/name')"
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "HF_HUB_OFFLINE forbids the network" in done.stderr


def test_a_hub_model_is_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve_model("org/name@v1")
    assert (found.folder, asked["repo"], asked["revision"]) == (folder, "org/name", "v1")
    assert found.revision == folder.name, "a snapshot's folder has the commit's name"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]


# short names and the real thing


def test_resolving_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, headrace.models.resolve, headrace.models.hub, huggingface_hub\n"
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_smollm2_answers_paris() -> None:
    """The default model end to end: fetched or found, converted or found, loaded and asked."""
    found = resolve_model("smollm2-135m")
    assert resolve_model("SmolLM2-135M") == found
    model = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(found.folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.encode("Hello 2024") == [19556, 216, 34, 32, 34, 36]
