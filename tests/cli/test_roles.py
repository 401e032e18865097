"""Prefill and decode replicas, from flags and files: what is made of them, and what cannot work together."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.cli.disk_space import disk_warnings
from headrace.cli.main import build_parser
from headrace.cli.settings import load_settings
from headrace.core.deployment import ModelDeployment
from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig


def deployed(*argv: str, **environment: str) -> ModelDeployment:
    (model,) = load_settings(build_parser().parse_args(["serve", *argv]), environment).deployment.models
    return model


def of_file(tmp_path: Path, text: str) -> ModelDeployment:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return deployed("--config", str(path))


EXAMPLE = Path(__file__).parents[2] / "examples" / "split.yaml"


def roles(model: ModelDeployment) -> dict[str, str]:
    return {replica.id: replica.role for replica in model.replicas}


def test_flags_make_both_sides() -> None:
    model = deployed("m", "--prefill", "1", "--decode", "2", "--kv-disk-gb", "2", "--kv-connector", "tcp")
    assert roles(model) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    assert {replica.engine.kv_disk_gb for replica in model.replicas} == {2.0}
    assert {replica.engine.kv_connector for replica in model.replicas} == {"tcp"}
    assert roles(deployed("m", HEADRACE_PREFILL="1", HEADRACE_DECODE="1")) == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }
    assert roles(deployed("m")) == {"replica-0": "unified"}


@pytest.mark.parametrize(
    ("argv", "words", "hint"),
    [
        (["--prefill", "1"], "--prefill 1", "--decode 1"),
        (["--decode", "2"], "--decode 2", "--prefill 1"),
        (
            ["--prefill", "1", "--decode", "1", "--replicas", "2"],
            "exclude each other",
            "leave --replicas out",
        ),
        (["--prefill", "40", "--decode", "40"], "64", ""),
        (["--prefill", "1", "--decode", "1", "--no-enable-prefix-caching"], "prefix caching off", "turn"),
        (["--prefill", "-1", "--decode", "1"], "--prefill", ""),
    ],
)
def test_flags_that_cannot_work(argv: list[str], words: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        deployed("m", *argv)
    assert words in raised.value.message and hint in (raised.value.hint or "")


def test_a_file_gives_replicas_roles(tmp_path: Path) -> None:
    listed = of_file(
        tmp_path,
        "models:\n- model: m\n  replicas:\n  - role: prefill\n    max_num_batched_tokens: 4096\n"
        "  - role: decode\n  - {role: decode, id: small}\n  - {}\n",
    )
    assert roles(listed) == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "small": "decode",
        "replica-0": "unified",
    }
    assert [replica.engine.max_num_batched_tokens for replica in listed.replicas] == [4096, 1024, 1024, 1024]
    counted = of_file(tmp_path, "models:\n- model: m\n  prefill: 1\n  decode: 2\n")
    assert roles(counted) == roles(deployed("m", "--prefill", "1", "--decode", "2"))


def test_a_unified_replica_can_prefill_for_decode_replicas(tmp_path: Path) -> None:
    model = of_file(tmp_path, "models:\n- model: m\n  replicas:\n  - {}\n  - role: decode\n")
    assert roles(model) == {"replica-0": "unified", "decode-0": "decode"}


def test_ids_tell_model_and_role(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("models:\n- {model: org/a, prefill: 1, decode: 1}\n- {model: b}\n")
    arguments = build_parser().parse_args(["serve", "--config", str(path)])
    first, second = load_settings(arguments, {}).deployment.models
    assert list(roles(first)) == ["a-prefill-0", "a-decode-0"] and list(roles(second)) == ["b-0"]


MODEL = "models:\n- model: m\n"


@pytest.mark.parametrize(
    ("text", "line", "words", "hint"),
    [
        (MODEL + "  replicas:\n  - role: decode\n", 4, "none that prefills", "role: prefill"),
        (MODEL + "  replicas:\n  - {}\n  - role: prefill\n", 5, "no decode replica", "role: decode"),
        (MODEL + "  prefill: 1\n", 3, "no decode replica", "role: decode"),
        (MODEL + "  replicas: 1\n  prefill: 1\n  decode: 1\n", 3, "excludes", "leave it out"),
        (MODEL + "  prefill: many\n  decode: 1\n", 3, "prefill", "prompts"),
        (MODEL + "  replicas:\n  - role: both\n", 4, "both", ""),
        (
            MODEL + "  replicas:\n  - role: prefill\n  - role: decode\n    dtype: float32\n",
            6,
            "dtype is float32 in decode-0 and auto in prefill-0",
            "engine:",
        ),
        (
            MODEL + "  replicas:\n  - role: prefill\n  - {role: decode, block_size: 16}\n",
            5,
            "block_size is 16 in decode-0 and 32 in prefill-0",
            "engine:",
        ),
        (
            MODEL
            + "  replicas:\n  - {role: prefill, kv_connector: shm}\n  - {role: decode, kv_connector: tcp}\n",
            5,
            "prefill-0 gives blocks over kv_connector shm, and decode-0 takes them over tcp",
            "auto",
        ),
        (
            MODEL + "  replicas:\n  - role: prefill\n  - {role: decode, enable_prefix_caching: false}\n",
            5,
            "decode-0 has role decode and prefix caching off",
            "enable_prefix_caching",
        ),
        (
            MODEL
            + "  replicas:\n  - {}\n  - role: decode\n  workers:\n  - url: http://x:1\n    role: prefill\n",
            7,
            "worker x:1 has role prefill, and no worker has role decode, and decode-0 cannot exchange",
            "role: decode",
        ),
        (
            MODEL + "  workers:\n  - {url: 'http://x:1', role: prefill, kind: vllm}\n"
            "  - {url: 'http://y:1', role: decode, kind: sglang}\n",
            4,
            "worker x:1 is vllm with role prefill, and no decode worker is",
            "a vllm worker",
        ),
        (
            MODEL + "  workers:\n  - {url: 'http://x:1', role: prefill, kind: openai}\n"
            "  - {url: 'http://y:1', role: decode, kind: openai}\n",
            4,
            "cannot have",
            "vllm and sglang",
        ),
    ],
)
def test_files_that_cannot_work_name_the_line(
    tmp_path: Path, text: str, line: int, words: str, hint: str
) -> None:
    with pytest.raises(UsageError) as raised:
        of_file(tmp_path, text)
    assert raised.value.message.startswith(f"{tmp_path}/deployment.yaml:{line}: "), raised.value.message
    assert words in raised.value.message and hint in (raised.value.hint or "")


def test_connectors_meet_where_one_side_takes_either(tmp_path: Path) -> None:
    of_file(
        tmp_path,
        MODEL
        + "  replicas:\n  - {role: prefill, kv_connector: tcp}\n  - {role: decode, kv_connector: auto}\n",
    )


def test_workers_of_one_kind_can_have_roles(tmp_path: Path) -> None:
    text = (
        MODEL + "  workers:\n  - {url: 'http://x:1', role: prefill, kind: vllm}\n"
        "  - {url: 'http://y:1', role: decode}\n"
    )
    model = of_file(tmp_path, text)
    assert [worker.endpoint("m").role for worker in model.workers] == ["prefill", "decode"]


def test_split_flags_beside_a_list_of_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(MODEL)
    with pytest.raises(UsageError, match="prefill is said for each model"):
        deployed("--config", str(path), "--prefill", "1", "--decode", "1")


def disk(folder: Path, gb: float, **knobs: bool) -> EngineConfig:
    return EngineConfig(kv_disk_gb=gb, kv_disk_path=str(folder), **knobs)


def test_a_disk_that_is_too_small_is_told_once(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    assert list(disk_warnings([EngineConfig(), disk(folder, 1e-3)])) == []
    (line,) = disk_warnings([disk(folder, 1e9), disk(folder, 1e9)])
    assert str(folder) in line and "--kv-disk-gb 1e+09" in line


def test_a_folder_without_a_size_is_told(tmp_path: Path) -> None:
    (line,) = disk_warnings([disk(tmp_path / "kv", 0.0), disk(tmp_path / "kv", 0.0)])
    assert "--kv-disk-gb" in line and str(tmp_path / "kv") in line
    assert not (tmp_path / "kv").exists()
    assert list(disk_warnings([disk(tmp_path / "kv", 0.0), disk(tmp_path / "kv", 1e-3)])) == []


def test_a_tilde_in_a_file_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(disk_warnings([disk(Path("~/kv"), 1e-3)])) == []
    assert (tmp_path / "kv" / "usage").is_file()


def test_a_disk_that_cannot_be_written_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def fail(path: str, flags: int, *more: int, **options: int) -> int:
        if str(path).endswith("usage"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", fail)
    (line,) = disk_warnings([disk(tmp_path / "kv", 1e-3)])
    assert "Read-only file system" in line


def test_a_folder_that_is_no_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as raised:
        list(disk_warnings([disk(tmp_path / "file", 1.0)]))
    assert "--kv-disk-path" in (raised.value.hint or "")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    os.chmod(open_to_all, 0o777)
    with pytest.raises(UsageError, match="other users"):
        list(disk_warnings([disk(open_to_all, 1.0)]))


def test_a_disk_tier_without_a_prefix_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="prefix caching is off"):
        list(disk_warnings([disk(tmp_path / "kv", 1.0, enable_prefix_caching=False)]))


def test_the_example_is_valid() -> None:
    arguments = build_parser().parse_args(["serve", "--config", str(EXAMPLE)])
    ours, others = load_settings(arguments, {}).deployment.models
    assert [replica.role for replica in ours.replicas] == ["prefill", "decode", "decode"]
    assert {replica.engine.kv_disk_gb for replica in ours.replicas} == {20.0}
    assert [worker.role for worker in others.workers] == ["prefill", "decode"]
