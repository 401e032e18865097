"""Flag beats environment beats file, and whatever is wrong in one of them is named."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headrace.cli.main import build_parser, main
from headrace.cli.settings import Settings, load_settings
from headrace.core.errors import UsageError
from headrace.models.packages import DEFAULT_MODEL


def settings(*argv: str, **environment: str) -> Settings:
    arguments: argparse.Namespace = build_parser().parse_args(["serve", *argv])
    return load_settings(arguments, environment)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.yaml"
    path.write_text("model: from-file\nport: 1\nmax-num-seqs: 3\napi_key: [a, b]\n")
    return path


def test_defaults() -> None:
    given = settings()
    assert given.deployment.models[0].model == DEFAULT_MODEL
    assert (given.gateway.host, given.gateway.port) == ("127.0.0.1", 8000)
    assert given.warnings == []


def test_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for shown in (
        "HEADRACE_GATEWAYS; default: 1;",
        "HEADRACE_ENABLE_PREFIX_CACHING; default: on;",
        "HEADRACE_PORT; default: 8000]",
        "hot: changes memory",
    ):
        assert shown in text


def test_help_says_what_kind_of_text_a_flag_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for shown in ("--worker-urls URL", "--kv-disk-path DIR", "--chat-template FILE", "--config FILE"):
        assert shown in text
    assert "TEXT" not in text


def test_precedence(config_file: Path) -> None:
    file = ("--config", str(config_file))
    assert settings(*file).deployment.models[0].model == "from-file"
    assert settings(*file).gateway.port == 1
    assert settings(*file).gateway.api_key == ["a", "b"]
    assert settings(*file, HEADRACE_PORT="2").gateway.port == 2
    assert settings(*file, "--port", "3", HEADRACE_PORT="2").gateway.port == 3
    assert settings("m", *file).deployment.models[0].model == "m"


def test_booleans_and_lists() -> None:
    assert settings("--no-enable-prefix-caching").engine.enable_prefix_caching is False
    assert settings(HEADRACE_ENABLE_PREFIX_CACHING="false").engine.enable_prefix_caching is False
    assert settings("--api-key", "a", "--api-key", "b").gateway.api_key == ["a", "b"]
    assert settings(HEADRACE_API_KEY="a,b").gateway.api_key == ["a", "b"]


@pytest.mark.parametrize(
    ("argv", "environment", "where"),
    [
        (["--port", "70000"], {}, "--port"),
        (["--port", "http"], {}, "--port"),
        ([], {"HEADRACE_PORT": "tcp://10.0.0.1:80"}, "HEADRACE_PORT"),
        (["--dtype", "float64"], {}, "--dtype"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs"),
        (["--kv-cache-gib", "nan"], {}, "--kv-cache-gib"),
        (["--kv-disk-gb", "-1"], {}, "--kv-disk-gb"),
        (["--kv-disk-gb", "1e300"], {}, "--kv-disk-gb"),
        (["--threads", "99999999"], {}, "--threads"),
    ],
)
def test_bad_values_name_their_source(argv: list[str], environment: dict[str, str], where: str) -> None:
    with pytest.raises(UsageError, match=f"^{where}: "):
        settings(*argv, **environment)


def test_a_value_that_is_none_of_the_choices_is_told_them() -> None:
    with pytest.raises(UsageError) as caught:
        settings("--kv-connector", "nixl")
    assert caught.value.message == "--kv-connector: expected auto or shm or tcp, got 'nixl'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nmax_num_seq: 3\n", ":2: unknown key 'max_num_seq'"),
        ("port: 1\n\nport: 2\n", "port"),
        ("port: 1\nmax-num-seqs: many\n", ":2: max_num_seqs: "),
        ("- 1\n", "needs a mapping"),
        ("a: [", "not valid YAML"),
        ("a: " + "[" * 1000, "nested too deeply"),
    ],
)
def test_bad_files_name_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        settings("--config", str(path))
    assert message in caught.value.message


def test_a_misspelt_variable_is_not_dropped_silently() -> None:
    (warning,) = settings(HEADRACE_MAX_NUM_SEQ="3").warnings
    assert "HEADRACE_MAX_NUM_SEQ " in warning and "HEADRACE_MAX_NUM_SEQS" in warning


def test_secrets_are_not_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "")
    assert main(["collect-env"]) == 0
    assert "HEADRACE_API_KEY (set, not shown)" in capsys.readouterr().out


def test_abbreviations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--max-num-s", "3"])
    assert caught.value.code == 2


def test_mistakes_exit_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --port: ") and "\nhint: " in error
