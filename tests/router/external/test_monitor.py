"""Recognition, health, load and restarts of each engine."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headrace.core.errors import UnavailableError
from headrace.core.messages import CacheSnapshot, Stats
from headrace.core.routing import Endpoint, ModelInfo
from headrace.router.external.http_client import HTTPClient
from headrace.router.external.monitor import ExternalMonitor
from headrace.router.external.recognise import recognise
from tests.router.external import engines
from tests.router.external.stand_in import Exchange, StandIn, until
from tests.router.external.test_kv_events import Publisher, ids, stored

LOG = logging.getLogger("test")


class Listener:
    """A placer that keeps what it hears; ``space`` is what model_info answers."""

    def __init__(self) -> None:
        self.ups: list[dict] = []
        self.downs: list[str] = []
        self.stats: list[Stats] = []
        self.held: set[bytes] = set()
        self.num_snapshots = 0
        self.space: ModelInfo | None = None

    def model_info(self, model):
        return self.space

    def on_up(self, replica_id, **fields):
        self.ups.append(fields)

    def on_down(self, replica_id, reason):
        self.downs.append(reason)

    def on_stats(self, replica_id, stats):
        self.stats.append(stats)

    def on_events(self, replica_id, first_seq, events):
        for event in events:
            self.held.update(getattr(event, "block_ids", []))

    def on_snapshot(self, replica_id, snapshot: CacheSnapshot):
        self.num_snapshots += 1
        self.held = set()


@pytest.fixture
async def server():
    async with StandIn() as server:
        yield server


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
async def watch(listener):
    monitors = []

    def start(server, **fields) -> ExternalMonitor:
        endpoint = Endpoint(replica_id="w", model="m", address=server.url, **fields)
        monitor = ExternalMonitor(endpoint, listener, log=LOG, poll_s=0.02, min_backoff_s=0.02)
        monitor.start()
        monitors.append(monitor)
        return monitor

    yield start
    for monitor in monitors:
        await monitor.close()


async def look(server, **fields):
    client = HTTPClient(server.url, log=LOG)
    try:
        return await recognise(client, Endpoint(replica_id="w", model="m", address=server.url, **fields))
    finally:
        await client.close()


async def test_vllm_is_recognised(server):
    source = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558",
              "topic": "kv"}  # fmt: skip
    engines.vllm(server, sources={"0": source})
    found = await look(server)
    assert found.capabilities.kind == "vllm" and found.capabilities.version == "0.32.0"
    assert found.capabilities.path == "/inference/v1/generate"
    assert found.capabilities.tokens and found.capabilities.abort and found.capabilities.load
    assert found.sources == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv")
    assert (found.block_size, found.num_blocks, found.max_model_len) == (16, 400, 4096)
    assert found.capabilities.remote_model == "their/model"


async def test_vllm_without_its_extras(server):
    engines.vllm(server, scale_out=False, metrics=b"")
    found = await look(server)
    assert found.capabilities.path == "/v1/completions" and not found.capabilities.cache_events
    assert any("no cache events" in limit for limit in found.capabilities.limits)


@pytest.mark.parametrize(
    "sources",
    [
        {"0": {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557"}},  # it connects there
        {"0": {"enable_kv_cache_events": False, "endpoint": "tcp://*:5557"}},
        {rank: {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{rank}"} for rank in ("0", "1")},
        {"0": "garbage"},
    ],
)
async def test_sources_that_cannot_be_followed(server, sources):
    engines.vllm(server, sources=sources)
    assert (await look(server)).sources is None


async def test_the_other_engines_are_recognised(server):
    engines.sglang(server)
    found = await look(server)
    assert found.capabilities.kind == "sglang" and found.capabilities.path == "/generate"
    assert (found.block_size, found.num_blocks, found.max_num_seqs, found.max_model_len) == (
        1,
        64000,
        48,
        2048,
    )
    engines.llama_server(server)
    found = await look(server)
    assert found.capabilities.kind == "llama-server" and found.capabilities.path == "/completion"
    assert (found.max_num_seqs, found.max_model_len, found.vocab_size) == (4, 2048, 1000)
    engines.tensorrt_llm(server)
    found = await look(server)
    assert found.capabilities.kind == "tensorrt-llm" and found.capabilities.path == "/v1/completions"


async def test_an_engine_behind_a_proxy_is_recognised_by_its_pages(server):
    for maker, kind in (
        (engines.tensorrt_llm, "tensorrt-llm"),
        (engines.llama_server, "llama-server"),
        (engines.sglang, "sglang"),
        (engines.vllm, "vllm"),
    ):
        maker(server)
        server.page("/v1/models", {"data": [{"id": "x", "owned_by": "proxy"}]})
        server.page("/get_model_info", {"model_path": "x"}) if kind == "sglang" else None
        if kind == "tensorrt-llm":
            server.post("/kv_cache_events", server.routes["/version"])
        assert (await look(server)).capabilities.kind == kind


async def test_any_other_server_is_text(server):
    server.page("/v1/models", {"data": [{"id": "gpt-x", "owned_by": "somebody"}]})
    capabilities = (await look(server)).capabilities
    assert capabilities.kind == "openai" and not capabilities.tokens and capabilities.remote_model == "gpt-x"
    assert any("text only" in limit for limit in capabilities.limits)


async def test_a_hosted_api_with_many_models_wants_a_name(server):
    server.page("/v1/models", {"data": [{"id": "a", "owned_by": "o"}, {"id": "b", "owned_by": "o"}]})
    with pytest.raises(UnavailableError, match="2 models"):
        await look(server)
    assert (await look(server, remote_model="b")).capabilities.remote_model == "b"
    with pytest.raises(UnavailableError, match="does not serve 'c'; it serves a, b"):
        await look(server, remote_model="c")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, {}, "refuses the key"),
        (500, {}, "status 500"),
        (200, {"data": 3}, "no list"),
        (200, {"data": []}, "no model"),
    ],
)
async def test_a_list_of_models_that_is_none(server, status, body, words):
    async def models(exchange: Exchange) -> None:
        exchange.reply(body, status)

    server.routes["/v1/models"] = models
    with pytest.raises(UnavailableError, match=words):
        await look(server)


async def test_a_refused_key_names_its_variable(server, monkeypatch):
    async def models(exchange: Exchange) -> None:
        exchange.reply({}, 401)

    server.routes["/v1/models"] = models
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(UnavailableError) as caught:
        await look(server, api_key_env="A_KEY")
    assert (caught.value.hint or "").startswith(
        "Its key is taken from the environment variable A_KEY, which is not set (--worker-api-key-env"
    )


async def test_a_key_that_is_refused_later_is_told_like_one_at_first(server, listener, watch):
    server.page("/v1/models", {"data": [{"id": "gpt-x", "owned_by": "somebody"}]})
    watch(server)
    await until(lambda: listener.ups)

    async def refuse(exchange: Exchange) -> None:
        exchange.reply({}, 403)

    server.routes["/v1/models"] = refuse
    await until(lambda: listener.downs)
    assert "refuses the key (status 403)" in listener.downs[0] and "api_key_env" in listener.downs[0]


async def test_load_in_our_words(server, listener, watch):
    engines.vllm(server)
    watch(server)
    await until(lambda: listener.stats)
    assert listener.stats[0] == Stats(
        num_running=3, num_waiting=2, num_blocks=400, num_free_blocks=300, num_preemptions=1,
        prefix_cache_queries=1000, prefix_cache_hits=640, prompt_tokens=1000, computed_prompt_tokens=360,
        generation_tokens=77,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("maker", "running", "waiting", "hits", "free"),
    [
        (engines.sglang, 4, 1, 200, 32000),
        (engines.llama_server, 2, 1, 100, 0),
        (engines.tensorrt_llm, 5, 2, 0, 60),
    ],
)
async def test_load_of_the_others(server, listener, watch, maker, running, waiting, hits, free):
    maker(server)
    watch(server)
    await until(lambda: listener.stats)
    stats = listener.stats[0]
    assert (stats.num_running, stats.num_waiting) == (running, waiting)
    assert (stats.prefix_cache_hits, stats.num_free_blocks) == (hits, free)


async def test_load_where_metrics_are_off(server, listener, watch):
    engines.llama_server(server)
    del server.routes["/metrics"]
    server.page("/slots", [{"is_processing": True}, {"is_processing": False}])
    watch(server)
    await until(lambda: listener.stats)
    assert listener.stats[0].num_running == 1


async def test_what_a_server_is_told_to_the_router_as(server, listener, watch):
    engines.vllm(server)
    watch(server, max_in_flight=9)
    await until(lambda: listener.ups)
    up = listener.ups[0]
    assert up["max_num_seqs"] == 9 and up["num_blocks"] == 400 and up["block_size"] == 16
    model = up["model"]
    assert (model.model, model.block_size, model.max_model_len, model.tokens) == ("m", 16, 4096, True)


async def test_the_space_of_the_others_is_taken_and_followed(server, listener, watch):
    engines.vllm(server)
    listener.space = ModelInfo(model="m", max_model_len=1, block_size=32, root_identity=b"o" * 32)
    watch(server)
    await until(lambda: listener.ups)
    assert listener.ups[0]["model"].root_identity == b"o" * 32
    assert (listener.ups[0]["block_size"], listener.ups[0]["num_blocks"]) == (32, 200)
    listener.space = ModelInfo(model="m", max_model_len=1, block_size=64, root_identity=b"p" * 32)
    await until(lambda: len(listener.ups) == 2)
    assert listener.ups[1]["model"].root_identity == b"p" * 32
    assert listener.ups[1]["instance"] == listener.ups[0]["instance"]


async def test_text_only_has_a_space_of_its_own(server, listener, watch):
    engines.vllm(server)
    watch(server, text_only=True)
    await until(lambda: listener.ups)
    assert not listener.ups[0]["model"].tokens and not listener.ups[0]["capabilities"].tokens
    assert listener.ups[0]["block_size"] == 64


async def test_a_server_that_is_down_at_first_is_asked_until_it_is_there(server, listener, watch):
    await server.stop()
    watch(server)
    await until(lambda: listener.downs)
    assert "takes no connection" in listener.downs[0] and not listener.ups
    engines.vllm(server)
    await server.__aenter__()
    await until(lambda: listener.ups)


async def test_one_that_misses_a_question_is_asked_again_soon(server, listener, monkeypatch):
    """And not after the quarter of a minute for which a hosted API is left alone."""
    monkeypatch.setattr("headrace.router.external.monitor.POLL_S", 0.02)
    asked = 0

    async def once(exchange: Exchange) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            exchange.reply({"data": [{"id": "gpt-x", "owned_by": "somebody"}]})
        else:
            exchange.reset()

    server.routes["/v1/models"] = once
    endpoint = Endpoint(replica_id="w", model="m", address=server.url)
    monitor = ExternalMonitor(endpoint, listener, log=LOG, poll_s=30.0, min_backoff_s=30.0)
    monitor.start()
    await until(lambda: listener.downs)
    assert len(listener.ups) == 1 and asked >= 4
    await monitor.close()


async def test_a_server_that_goes_away_is_down_and_comes_back_as_another(server, listener, watch):
    engines.llama_server(server)
    server.page("/props", {})  # nothing that tells one process from the next
    watch(server)
    await until(lambda: listener.ups)
    await server.stop()
    await until(lambda: listener.downs)
    await server.__aenter__()
    await until(lambda: len(listener.ups) == 2)
    assert listener.ups[0]["instance"] != listener.ups[1]["instance"]


async def test_a_restart_between_two_looks_shows_in_the_counters(server, listener, watch):
    engines.vllm(server)
    watch(server)
    await until(lambda: listener.stats)
    fresh = engines.VLLM_METRICS.replace(b" 1000.0", b" 5.0").replace(b" 77.0", b" 0.0")
    server.page("/metrics", fresh, "text/plain")
    await until(lambda: len(listener.ups) == 2)
    assert listener.ups[0]["instance"] != listener.ups[1]["instance"]


async def test_a_dead_engine_behind_a_living_server_is_down(server, listener, watch):
    engines.vllm(server)
    watch(server)
    await until(lambda: listener.ups)

    async def dead(exchange: Exchange) -> None:
        exchange.reply(b"", 503)

    server.routes["/health"] = dead
    await until(lambda: listener.downs)
    assert "503" in listener.downs[0]


async def test_events_are_followed_and_told_in_our_blocks(server, listener, watch, tmp_path):
    publisher = Publisher(tmp_path)
    root = b"r" * 32  # of test_kv_events.ids
    listener.space = ModelInfo(model="m", max_model_len=1, block_size=4, root_identity=root)
    source = {"enable_kv_cache_events": True, "endpoint": publisher.address,
              "replay_endpoint": publisher.replay_address}  # fmt: skip
    engines.vllm(server, sources={"0": source})
    monitor = watch(server)
    await publisher.subscribed()
    await publisher.publish(stored(1), stored(2), ts=1)
    await until(lambda: listener.held == ids(1, 2))
    assert listener.ups[0]["capabilities"].cache_events
    await monitor.close()
    await publisher.close()


async def test_events_that_never_arrive_are_not_relied_on(server, listener, watch, tmp_path):
    source = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/nobody"}
    engines.vllm(server, sources={"0": source})
    watch(server)
    await until(lambda: listener.stats)
    assert listener.ups[0]["capabilities"].cache_events
    busy = engines.VLLM_METRICS.replace(b"1000.0\nvllm:generation", b"9000.0\nvllm:generation")
    server.page("/metrics", busy, "text/plain")
    await until(lambda: len(listener.ups) == 2)
    capabilities = listener.ups[1]["capabilities"]
    assert not capabilities.cache_events and any("do not arrive" in limit for limit in capabilities.limits)


async def test_closing_in_any_state_leaves_nothing(server, listener, watch):
    engines.vllm(server)
    monitor = watch(server)
    await monitor.close()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not {name for name in names if name.startswith(("monitor-", "events-", "external-"))}
