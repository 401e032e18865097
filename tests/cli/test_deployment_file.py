"""A deployment is what flags or a file say, and a mistake in the file names its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import build_parser
from headrace.cli.settings import Settings, load_settings
from headrace.core.deployment import WorkerDeployment
from headrace.core.errors import UsageError
from headrace.models.packages import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "deployment.yaml"
REFERENCE = ROOT / "docs" / "fleet.md"


def settings(*argv: str, **environment: str) -> Settings:
    return load_settings(build_parser().parse_args(["serve", *argv]), environment)


def from_file(tmp_path: Path, text: str, *argv: str, **environment: str) -> Settings:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return settings("--config", str(path), *argv, **environment)


def test_flags_alone_make_one_model() -> None:
    (model,) = settings().deployment.models
    assert (model.model, model.names) == (DEFAULT_MODEL, [DEFAULT_MODEL])
    assert [replica.id for replica in model.replicas] == ["replica-0"]
    (model,) = settings(
        "m", "--replicas", "3", "--served-model-name", "x", "--threads", "2"
    ).deployment.models
    assert (model.model, model.name) == ("m", "x")
    assert [replica.id for replica in model.replicas] == ["replica-0", "replica-1", "replica-2"]
    assert all(replica.engine.threads == 2 for replica in model.replicas)


def test_worker_urls_stand_alone_unless_replicas_are_asked_for() -> None:
    given = settings(
        "--worker-urls", "http://a:1/v1/", "--overflow-urls", "https://b", "--worker-api-key-env", "KEY"
    )
    (model,) = given.deployment.models
    assert (model.model, model.names, model.replicas) == ("", [], [])
    own, overflow = model.workers
    assert (own.id, own.url, own.overflow, own.api_key_env) == ("a:1", "http://a:1", False, "KEY")
    assert (overflow.id, overflow.overflow) == ("b", True)
    endpoint = overflow.endpoint("m")
    assert (endpoint.model, endpoint.address, endpoint.overflow) == ("m", "https://b", True)
    (model,) = settings("--worker-urls", "http://a:1", "--replicas", "1").deployment.models
    assert (model.model, len(model.replicas)) == (DEFAULT_MODEL, 1)
    (model,) = settings("--overflow-urls", "http://a:1").deployment.models
    assert (model.model, len(model.replicas)) == (DEFAULT_MODEL, 1)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--replicas", "0"], "nothing to answer"),
        (["--replicas", "0", "--overflow-urls", "http://a:1"], "nothing to answer"),
        (["--replicas", "65"], "--replicas: "),
        (["--worker-urls", "a:1"], "--worker-urls: expected a base URL"),
        (["--worker-urls", "http://a:1", "--overflow-urls", "http://a:1/"], "used twice"),
        (["--worker-urls", "http://user:secret@a:1"], "must not hold a password"),
    ],
)
def test_bad_flags(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings(*argv)


FILE = """\
port: 8123
max_num_seqs: 7
models:
  - model: smollm2-135m
    served_model_name: [small, tiny]
    replicas: 2
    engine:
      max-num-seqs: 5
  - model: qwen2.5-coder-1.5b
    replicas:
      - id: big
        threads: 4
        price_per_hour: 1.5
        hardware: cpu x4
      - kv_cache_gib: 0.5
    workers:
      - url: http://10.0.0.5:8000
        kind: vllm
        kv_events: tcp://10.0.0.5:5557
        overflow: true
"""


def test_a_file_of_models(tmp_path: Path) -> None:
    given = from_file(tmp_path, FILE)
    assert given.gateway.port == 8123
    small, coder = given.deployment.models
    assert (small.name, small.names) == ("small", ["small", "tiny"])
    assert [replica.id for replica in small.replicas] == ["small-0", "small-1"]
    assert [replica.engine.max_num_seqs for replica in small.replicas] == [5, 5]
    big, other = coder.replicas
    assert (big.id, big.engine.threads, big.price_per_hour, big.hardware) == ("big", 4, 1.5, "cpu x4")
    assert (other.id, other.engine.kv_cache_gib) == ("qwen2.5-coder-1.5b-1", 0.5)
    assert big.engine.max_num_seqs == 7
    (worker,) = coder.workers
    assert (worker.kind, worker.overflow, worker.id) == ("vllm", True, "10.0.0.5:8000")


def test_flag_beats_environment_beats_file_also_inside_models(tmp_path: Path) -> None:
    def max_num_seqs(*argv: str, **environment: str) -> int:
        return from_file(tmp_path, FILE, *argv, **environment).deployment.models[0].engine.max_num_seqs

    assert max_num_seqs(HEADRACE_MAX_NUM_SEQS="3") == 3
    assert max_num_seqs("--max-num-seqs", "2", HEADRACE_MAX_NUM_SEQS="3") == 2


def test_yaml_merges_keep_their_meaning(tmp_path: Path) -> None:
    first_item = "  - &base\n    threads: 1\n    kv_cache_gib: 0.5\n"
    text = f"models:\n- model: m\n  replicas:\n{first_item}  - <<: *base\n    threads: 2\n"
    first, second = from_file(tmp_path, text).deployment.models[0].replicas
    assert (first.engine.threads, second.engine.threads) == (1, 2)
    assert first.engine.kv_cache_gib == second.engine.kv_cache_gib == 0.5


@pytest.mark.parametrize(
    ("text", "line", "words", "hint"),
    [
        ("models: 3\n", 1, "needs a list", "- "),
        ("models: []\n", 1, "at least one", ""),
        ("port: 1\nmodels: !!python/object/apply:os.system [id]\n", 2, "needs keys", ""),
        ("models:\n- smollm2\n", 2, "needs keys", ""),
        ("models:\n- replicas: 1\n", 2, "needs `model:`", ""),
        ("models:\n- model: m\n  replica: 1\n", 3, "unknown key 'replica'", "did you mean replicas?"),
        ("models:\n- model: m\n  color: red\n", 3, "unknown key 'color'", "served_model_name"),
        ("models:\n- model: m\n  engine:\n    max_num_seq: 1\n", 4, "unknown key", "max_num_seqs"),
        ("models:\n- model: m\n  engine:\n    max_num_seqs: lots\n", 4, "max_num_seqs: expected int", ""),
        ("models:\n- model: m\n  engine:\n    block_size: 0\n", 4, "block_size: ", ""),
        ("models:\n- model: m\n  engine: fast\n", 3, "engine needs keys", ""),
        ("models:\n- model: m\n  replicas: -1\n", 3, "replicas: expected", ""),
        ("models:\n- model: m\n  replicas: true\n", 3, "replicas: expected", ""),
        ("models:\n- model: m\n  replicas: many\n", 3, "replicas needs a list", ""),
        ("models:\n- model: m\n  replicas: 0\n", 3, "neither replicas nor workers", ""),
        ("models:\n- model: m\n  replicas: []\n", 3, "neither replicas nor workers", ""),
        ("models:\n- model: m\n  workers: []\n  replicas: 0\n", 4, "neither replicas nor workers", ""),
        ("models:\n- model: m\n  replicas:\n  - id: a\n  - id: a\n", 5, "'a' is used twice", "another id"),
        ("models:\n- model: m\n  replicas:\n  - id: a\n    prise: 1\n", 5, "unknown key 'prise'", ""),
        ("models:\n- model: m\n  replicas:\n  - price_per_hour: -1\n", 4, "price_per_hour: ", ""),
        ("models:\n- model: m\n  replicas:\n  - {}\n  - dtype: float32\n", 5, "must agree", "engine:"),
        ("models:\n- model: m\n- model: m\n", 3, "'m' is used twice (first at", "served_model_name"),
        (
            "models:\n- model: m\n  served_model_name: [x, y]\n- model: n\n  served_model_name: y\n",
            5,
            "'y' is used twice",
            "",
        ),
        ("models:\n- model: m\n  served_model_name: 3\n", 3, "served_model_name needs a list", ""),
        ("models:\n- model: m\n  served_model_name: [3]\n", 3, "needs a text", ""),
        ("models:\n- model: m\n  workers:\n  - kind: vllm\n", 4, "needs `url:`", "http://"),
        ("models:\n- model: m\n  workers:\n  - url: ftp://a\n", 4, "expected a base URL", ""),
        ("models:\n- model: m\n  workers:\n  - url: http://a\n    kind: vlm\n", 5, "kind: ", ""),
        (
            "models:\n- model: m\n  workers:\n  - url: http://a\n    kind: headrace\n",
            5,
            "kind headrace",
            "openai",
        ),
        (
            "models:\n- model: m\n  workers:\n  - url: http://a\n    urls: x\n",
            5,
            "unknown key",
            "did you mean url?",
        ),
        ("models:\n- model: m\n  workers:\n  - url: http://a\n    kv_events: a:1\n", 5, "tcp://", ""),
        (
            "models:\n- model: m\n  workers:\n  - url: http://a\n    kv_replay: tcp://a:1\n",
            5,
            "needs kv_events",
            "",
        ),
        ("models:\n- model: m\n  workers:\n  - url: http://a\n  - url: http://a/\n", 5, "used twice", "id"),
        (
            "models:\n- model: m\n  workers:\n  - url: http://a\n    max_in_flight: x\n",
            5,
            "max_in_flight: ",
            "",
        ),
        ("models:\n- model: m\n  model: n\n", 3, "", ""),
        ("model: m\nmodels:\n- model: m\n", 1, "exclude each other", ""),
        ("replicas: 2\nmodels:\n- model: m\n", 1, "said for each model", "models:"),
        ("modles:\n- model: m\n", 1, "unknown key 'modles'", "did you mean models?"),
    ],
)
def test_mistakes_name_their_line(tmp_path: Path, text: str, line: int, words: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_file(tmp_path, text)
    if words:
        assert f"{tmp_path / 'fleet.yaml'}:{line}: " in caught.value.message
    else:
        assert f"line {line}" in caught.value.message, "the parser's own words"
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")


def test_flags_that_the_list_of_models_replaces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names its models"):
        from_file(tmp_path, FILE, "other")
    with pytest.raises(UsageError, match="--replicas or HEADRACE_REPLICAS: replicas is said for each model"):
        from_file(tmp_path, FILE, "--replicas", "2")
    with pytest.raises(UsageError, match="said for each model"):
        from_file(tmp_path, FILE, HEADRACE_SERVED_MODEL_NAME="x")


def test_the_example_is_valid() -> None:
    given = settings("--config", str(EXAMPLE))
    assert given.deployment.models
    assert any(model.workers for model in given.deployment.models)


def test_the_reference_shows_a_valid_file_and_every_key(tmp_path: Path) -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    block = text.partition("```yaml\n")[2].partition("```")[0]
    small, coder = from_file(tmp_path, block).deployment.models
    assert (small.name, len(small.replicas), len(coder.replicas), len(coder.workers)) == ("small", 2, 2, 1)
    for name in WorkerDeployment.__struct_fields__:
        assert f"`{name}`" in text, f"{name} is described"
