"""Everything that does not generate: models, health, metrics, tokenize, keys, the API's description."""

from __future__ import annotations

import openai
import pytest

from headrace import __version__
from headrace.core.knobs import GatewayConfig
from headrace.gateway.auth import Keys
from tests.gateway.tiny import Stack, call, chat, complete


def test_models(stack, monkeypatch):
    with openai.OpenAI(base_url=stack.api, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny", "other-name"]
        assert client.models.retrieve("other-name").id == "other-name"
    card = call(stack, "/v1/models").json["data"][0]
    monkeypatch.setattr(stack.gateway.models[0], "source", "org/its-name")
    assert call(stack, "/v1/models").json["data"][0]["root"] == "org/its-name", "what it was loaded from"
    assert (card["root"], card["max_model_len"], card["object"]) == ("tiny-model", 512, "model")
    assert chat(stack, model="other-name").json["model"] == "other-name"


def test_health_ready_version(stack):
    assert call(stack, "/health").status == 200
    assert call(stack, "/ready").json["status"] == "ready"
    assert call(stack, "/version").json == {"version": __version__}


def test_several_models(tokenizer, tmp_path):
    models = {"first-model": ("one", "uno"), "second-model": ("two",)}
    with Stack(tokenizer, tmp_path, models=models) as stack:
        cards = call(stack, "/v1/models").json["data"]
        assert [(card["id"], card["root"]) for card in cards] == [
            ("one", "first-model"),
            ("uno", "first-model"),
            ("two", "second-model"),
        ]
        assert call(stack, "/v1/models/two").json["root"] == "second-model"
        ready = call(stack, "/ready").json
        assert [(model["id"], model["ready"]) for model in ready["models"]] == [("one", True), ("two", True)]
        stack.run(stack.replicas[1].close())
        stack.wait_for(lambda: not stack.dispatcher.ready("second-model"), "replica gone")
        ready = call(stack, "/ready")
        assert ready.status == 200, "one model can answer"
        assert [(model["id"], model["ready"]) for model in ready.json["models"]] == [
            ("one", True),
            ("two", False),
        ]
        assert "no replica of two is ready" in ready.json["models"][1]["reason"]


def test_without_a_replica_nothing_is_ready(tokenizer, tmp_path):
    models = {"first-model": ("one",), "second-model": ("two",)}
    with Stack(tokenizer, tmp_path, models=models, with_replica=False) as stack:
        answer = call(stack, "/ready")
        assert answer.status == 503
        assert "no replica of one is ready" in answer.error["message"]
        assert "no replica of two is ready" in answer.error["message"]
        assert answer.headers["retry-after"]
        assert call(stack, "/health").status == 200


def test_heads(stack):
    for path in ("/health", "/v1/models", "/metrics"):
        answer = call(stack, path, method="HEAD")
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models", "/metrics", "/openapi.json"])
def test_every_response_has_a_request_id(stack, path):
    assert call(stack, path, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert call(stack, path).headers["x-request-id"]


def test_tokenize_and_back(stack):
    answer = call(stack, "/tokenize", {"prompt": "hello world", "return_token_strs": True}).json
    expected = stack.tokenizer.encode("hello world").tolist()
    assert answer["tokens"] == expected
    assert (answer["count"], answer["max_model_len"]) == (len(expected), 512)
    assert "".join(answer["token_strs"]) == "hello world"
    assert call(stack, "/detokenize", {"tokens": expected}).json == {"prompt": "hello world"}
    assert call(stack, "/tokenize", {"prompt": ""}).json["tokens"] == stack.tokenizer.encode("").tolist()


def test_tokenize_a_conversation(stack):
    messages = [{"role": "user", "content": "hello"}]
    answer = call(stack, "/tokenize", {"messages": messages}).json
    assert answer["tokens"] == stack.tokenizer.encode_chat(messages).tolist()
    assert answer["token_strs"] is None
    bare = call(stack, "/tokenize", {"messages": messages, "add_generation_prompt": False}).json
    assert bare["tokens"] == answer["tokens"][: len(bare["tokens"])]
    assert bare["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**7]}),
        ("/detokenize", {"tokens": [10**30]}),
    ],
)
def test_wrong_tokenize_requests(stack, path, body):
    answer = call(stack, path, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


def _metrics(stack: Stack) -> dict[str, float]:
    page = call(stack, "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    lines = [line for line in page.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics(stack):
    before = _metrics(stack)
    stack.replica.num_cached_tokens = 16
    chat(stack, stream=True)
    complete(stack, max_tokens=2, n=2)
    after = _metrics(stack)
    name = '{model_name="tiny"}'

    def grown(metric: str) -> float:
        return after[metric] - before[metric]

    prompt = sum(request.num_prompt_tokens for request in stack.replica.requests)
    tokens = len(stack.tokenizer.encode("The capital of France is Paris.", False)) + 1
    assert grown(f"headrace_prompt_tokens_total{name}") == prompt
    assert grown(f"headrace_generation_tokens_total{name}") == tokens + 4
    assert grown('headrace_request_success_total{finished_reason="stop",model_name="tiny"}') == 1
    assert grown('headrace_request_success_total{finished_reason="length",model_name="tiny"}') == 2
    assert grown(f"headrace_time_to_first_token_seconds_count{name}") == 3
    assert grown(f"headrace_inter_token_latency_seconds_count{name}") == tokens - 1 + 2
    assert grown(f"headrace_e2e_request_latency_seconds_count{name}") == 3
    assert grown(f"headrace_gateway_text_seconds_count{name}") == 2
    assert grown(f"headrace_request_prompt_tokens_sum{name}") == prompt
    replica = '{model_name="tiny",replica="fake-0"}'
    assert after[f"headrace_replica_up{replica}"] == 1
    assert after[f"headrace_num_requests_waiting{replica}"] == 3
    assert after[f"headrace_kv_cache_usage_perc{replica}"] == 0.25
    assert after[f"headrace_prefix_cache_queries_total{replica}"] == 200
    assert after[f"headrace_prefix_cache_hits_total{replica}"] == 150
    assert grown(f"headrace_replica_placements_total{replica}") == 2
    assert after["headrace_num_requests_admitted"] == 0
    buckets = [value for key, value in after.items() if "time_to_first_token_seconds_bucket" in key]
    assert buckets == sorted(buckets)
    assert buckets[-1] == after[f"headrace_time_to_first_token_seconds_count{name}"]


def test_openapi_describes_every_route(stack):
    description = call(stack, "/openapi.json").json
    assert description["openapi"].startswith("3.1")
    for path, operations in description["paths"].items():
        for method in operations:
            answer = call(stack, path.replace("{model}", "tiny"), b"{" if method == "post" else None)
            assert answer.status == (400 if method == "post" else 200), path
    chat_body = description["components"]["schemas"]["ChatBody"]
    assert {"messages", "temperature", "top_k", "stream_options"} <= set(chat_body["properties"])
    assert chat_body["required"] == ["messages"]


@pytest.fixture(scope="module")
def locked(tokenizer, tmp_path_factory):
    config = GatewayConfig(port=0, api_key=["secret-one", "sécret-two"], shutdown_grace_s=0.5)
    with Stack(tokenizer, tmp_path_factory.mktemp("locked"), config) as stack:
        yield stack


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic secret-one", "secret-one", "Bearer secret-on"],
)
def test_wrong_keys(locked, header):
    headers = {} if header is None else {"authorization": header}
    for path, body in (("/v1/chat/completions", {"messages": []}), ("/v1/models", None), ("/nowhere", None)):
        answer = call(locked, path, body, headers=headers)
        assert answer.status == 401
        assert answer.error["type"] == "authentication_error"
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("key", ["secret-one", "sécret-two"])
def test_right_keys(locked, key):
    headers = {"authorization": f"bearer {key}".encode().decode("latin-1")}
    assert call(locked, "/v1/models", headers=headers).status == 200


def test_open_paths_need_no_key(locked):
    assert [call(locked, path).status for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]


def test_without_keys_everybody_may_pass():
    Keys([]).check("/v1/models", None)
