"""Which server is behind an address, and what it offers.

/v1/models names the owner:  vllm · sglang · llamacpp · tensorrt_llm · anyone else
then the server's own pages say the rest; a page that is missing costs what it would have told
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.routing import UNKNOWN_MODEL_LEN, Capabilities, Endpoint, EngineKind
from headrace.router.external import (
    llama_server,
    openai_text,
    sglang,
    sglang_pair,
    tensorrt_llm,
    vllm,
    vllm_generate,
    vllm_pair,
)
from headrace.router.external.faults import refused_key
from headrace.router.external.http_client import HTTPClient, HTTPFailure
from headrace.router.external.prometheus import Samples
from headrace.router.kv_traits import PAIRING_KINDS

TEXT_LIMIT = "text only: bodies pass through, and the server's tokenizer, template and defaults apply"
NO_EVENTS_LIMIT = (
    "no cache events (--kv-events-config with an endpoint it binds, such as tcp://*:5557): what its cache "
    "holds is a guess"
)
SILENT_EVENTS_LIMIT = "its cache events do not arrive: what its cache holds is a guess"
BROKEN_LIMIT = "a broken stream is reported, not continued elsewhere"
_OWNERS: dict[str, EngineKind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama-server",
    "tensorrt_llm": "tensorrt-llm",
}


class ModelCard(msgspec.Struct):
    """One entry of ``/v1/models``."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    meta: dict[str, Any] | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


_models = msgspec.json.Decoder(_Models)


class Recognised(msgspec.Struct, kw_only=True):
    """What a server said of itself; 0 and empty where it said nothing.

    ``instance`` changes with its process where it tells. ``sources``: ZeroMQ addresses of cache events and
    of their replay, and the topic.
    """

    capabilities: Capabilities
    max_model_len: int = UNKNOWN_MODEL_LEN
    vocab_size: int = 0
    block_size: int = 0
    num_blocks: int = 0
    max_num_seqs: int = 0
    hardware: str = ""
    instance: str = ""
    sources: tuple[str, str, str] | None = None


async def recognise(client: HTTPClient, endpoint: Endpoint) -> Recognised:
    """Asks the server; UnavailableError or HTTPFailure when it does not answer, or lacks the model."""
    card = await _model_card(client, endpoint)
    kind = endpoint.kind or _OWNERS.get(card.owned_by) or await _guess(client)
    if endpoint.role != "unified" and kind not in PAIRING_KINDS:
        raise UnavailableError(
            f"{endpoint.address} is {kind} and cannot have the role {endpoint.role}",
            hint=f"Leave its role out: only {' and '.join(PAIRING_KINDS)} servers have one.",
        )
    if kind == "vllm":
        return await _vllm(client, endpoint, card)
    if kind == "sglang":
        return await _sglang(client, endpoint, card)
    if kind == "llama-server":
        return await _llama_server(client, endpoint, card)
    if kind == "tensorrt-llm":
        return await _tensorrt_llm(client, endpoint, card)
    capabilities = Capabilities(
        kind="openai", remote_model=card.id, abort=True, limits=list(openai_text.LIMITS)
    )
    return Recognised(capabilities=capabilities, max_model_len=card.max_model_len or UNKNOWN_MODEL_LEN)


async def _model_card(client: HTTPClient, endpoint: Endpoint) -> ModelCard:
    """The model behind the endpoint: the named one, or the only one."""
    status, body = await client.fetch("GET", "/v1/models")
    wanted = endpoint.remote_model
    if status in (401, 403):
        raise refused_key(endpoint.address, status, endpoint.api_key_env)
    if status in (404, 405) and wanted:
        return ModelCard(wanted)  # a hosted API without that page
    if status != 200:
        raise UnavailableError(f"{endpoint.address}/v1/models answers with status {status}")
    try:
        cards = _models.decode(body).data
    except msgspec.DecodeError as error:
        raise UnavailableError(f"{endpoint.address}/v1/models is no list of models: {error}") from None
    names = [card.id for card in cards]
    if wanted:
        for card in cards:
            if card.id == wanted:
                return card
        raise UnavailableError(
            f"{endpoint.address} does not serve {wanted!r}; it serves {', '.join(names[:8]) or 'nothing'}"
        )
    for card in cards:
        if card.id == endpoint.model:
            return card
    if not cards:
        raise UnavailableError(f"{endpoint.address} serves no model yet")
    if len(cards) > 1 and cards[0].owned_by not in _OWNERS:
        raise UnavailableError(
            f"{endpoint.address} serves {len(cards)} models and none is called {endpoint.model!r}",
            hint="Name it: remote_model of that replica in the deployment file.",
        )
    return cards[0]


async def _guess(client: HTTPClient) -> EngineKind:
    """By pages that only one engine has; behind proxies that rename the owner."""
    page = await _page(client, "/metrics")
    if page is not None and b"vllm:" in page:
        return "vllm"
    if await _json(client, "/get_model_info") is not None:
        return "sglang"
    props = await _json(client, "/props")
    if props is not None and "total_slots" in props:
        return "llama-server"
    if await _has_post(client, "/kv_cache_events"):
        return "tensorrt-llm"
    return "openai"


async def _vllm(client: HTTPClient, endpoint: Endpoint, card: ModelCard) -> Recognised:
    version = (await _json(client, "/version") or {}).get("version", "")
    tokens = not endpoint.text_only
    path = await _vllm_path(client) if tokens else ""
    page = await _page(client, "/metrics")
    samples = Samples(page or b"")
    cache = samples.labels("vllm:cache_config_info")
    block_size = _int(cache.get("block_size"))
    sources = await _vllm_sources(client, endpoint) if tokens and block_size else None
    limits = list(vllm.LIMITS) if tokens else [TEXT_LIMIT, BROKEN_LIMIT]
    if path == vllm.VLLMCompletions.path:
        limits.append(vllm.COMPLETIONS_LIMIT)
    if sources is None and tokens:
        limits.append(NO_EVENTS_LIMIT)
    elif sources is not None and not sources[1]:
        limits.append("no replay of cache events (replay_endpoint): after a gap its index begins anew")
    if page is None:
        limits.append("no /metrics: how busy it is is a guess")
    if endpoint.role != "unified":
        limits.append(vllm_pair.LIMIT)
    started = samples.get("process_start_time_seconds")
    return Recognised(
        capabilities=Capabilities(
            kind="vllm",
            version=str(version),
            remote_model=card.id,
            path=path,
            tokens=tokens,
            cache_events=sources is not None,
            abort=True,
            load=page is not None,
            limits=limits,
        ),
        max_model_len=card.max_model_len or UNKNOWN_MODEL_LEN,
        block_size=block_size,
        num_blocks=_int(cache.get("num_gpu_blocks")),
        instance=f"{started:.2f}" if started else "",
        sources=sources,
    )


async def _vllm_path(client: HTTPClient) -> str:
    """The tokens-only interface where it is there and allowed: an empty body is then a bad one (400)."""
    path = vllm_generate.VLLMGenerate.path
    status, _ = await client.fetch("POST", path, b"{}")
    return path if status in (400, 422) else vllm.VLLMCompletions.path


async def _vllm_sources(client: HTTPClient, endpoint: Endpoint) -> tuple[str, str, str] | None:
    """Where events come from: as the endpoint says, else as the server does. One rank only: with more,
    blocks are on some of them, which one address does not tell apart."""
    told = await _json(client, "/kv_event_sources") or {}
    source = next(iter(told.values())) if len(told) == 1 else {}
    if not isinstance(source, dict):
        source = {}
    topic = source.get("topic") or ""
    if endpoint.kv_events:
        return endpoint.kv_events, endpoint.kv_replay, topic if isinstance(topic, str) else ""
    address = source.get("endpoint")
    if not isinstance(address, str) or not source.get("enable_kv_cache_events"):
        return None
    if "*" not in address and not address.startswith("ipc://"):
        return None  # it binds only these; to any other address it connects, and nobody listens there
    replay = source.get("replay_endpoint")
    host = client.base.host
    return _reach(address, host), _reach(replay, host) if isinstance(replay, str) else "", str(topic)


def _reach(address: str, host: str) -> str:
    """A bound address as it is connected to."""
    name = f"[{host}]" if ":" in host else host
    for anywhere in ("*", "0.0.0.0", "[::]"):
        address = address.replace(f"tcp://{anywhere}:", f"tcp://{name}:")
    return address


async def _sglang(client: HTTPClient, endpoint: Endpoint, card: ModelCard) -> Recognised:
    info = await _json(client, "/server_info") or await _json(client, "/get_server_info") or {}
    tokens = not endpoint.text_only and await _has_post(client, sglang.SGLang.path)
    page = await _page(client, "/metrics")
    has_load = (page is not None and b"sglang:" in page) or await _page(client, "/get_load") is not None
    page_size = _int(info.get("page_size")) or 1
    events = tokens and bool(endpoint.kv_events)
    limits = list(sglang.LIMITS) if tokens else [TEXT_LIMIT, BROKEN_LIMIT]
    if tokens and not events:
        limits.append("no cache events (kv_events of the replica): what its cache holds is a guess")
    if endpoint.role != "unified":
        limits.append(sglang_pair.LIMIT)
    if not has_load:
        limits.append("no /metrics (--enable-metrics): how busy it is is a guess")
    context = card.max_model_len or _int(info.get("max_req_input_len")) or _int(info.get("context_length"))
    return Recognised(
        capabilities=Capabilities(
            kind="sglang",
            version=str(info.get("version", "")),
            remote_model=card.id,
            path=sglang.SGLang.path if tokens else "",
            tokens=tokens,
            cache_events=events,
            abort=True,
            load=has_load,
            limits=limits,
        ),
        max_model_len=context or UNKNOWN_MODEL_LEN,
        block_size=page_size,
        num_blocks=_int(info.get("max_total_num_tokens")) // page_size,
        max_num_seqs=_int(info.get("max_running_requests")),
        instance=str(info.get("random_seed", "")),
        sources=(endpoint.kv_events, endpoint.kv_replay, "") if events else None,
    )


async def _llama_server(client: HTTPClient, endpoint: Endpoint, card: ModelCard) -> Recognised:
    props = await _json(client, "/props") or {}
    page = await _page(client, "/metrics")
    slots = await _page(client, "/slots") if page is None else None
    settings = props.get("default_generation_settings")
    context = _int(settings.get("n_ctx")) if isinstance(settings, dict) else 0
    tokens = not endpoint.text_only
    limits = list(llama_server.LIMITS) if tokens else [TEXT_LIMIT, BROKEN_LIMIT]
    if page is None:
        limits.append("no /metrics (--metrics): its queue and cache hits are not known")
    return Recognised(
        capabilities=Capabilities(
            kind="llama-server",
            version=str(props.get("build_info", "")),
            remote_model=card.id,
            path=llama_server.LlamaServer.path if tokens else "",
            tokens=tokens,
            abort=True,
            load=page is not None or slots is not None,
            limits=limits,
        ),
        max_model_len=context or UNKNOWN_MODEL_LEN,
        vocab_size=_int((card.meta or {}).get("n_vocab")),
        max_num_seqs=_int(props.get("total_slots")),
        instance=str(props.get("media_marker", "")),  # drawn anew by each process
    )


async def _tensorrt_llm(client: HTTPClient, endpoint: Endpoint, card: ModelCard) -> Recognised:
    version = (await _json(client, "/version") or {}).get("version", "")
    tokens = not endpoint.text_only
    load = await _page(client, "/metrics") is not None
    limits = list(tensorrt_llm.LIMITS) if tokens else [TEXT_LIMIT, BROKEN_LIMIT]
    if not load:
        limits.append("no /metrics: how busy it is is a guess")
    return Recognised(
        capabilities=Capabilities(
            kind="tensorrt-llm",
            version=str(version),
            remote_model=card.id,
            path=tensorrt_llm.TensorRTLLM.path if tokens else "",
            tokens=tokens,
            abort=True,
            load=load,
            limits=limits,
        ),
        max_model_len=card.max_model_len or UNKNOWN_MODEL_LEN,
    )


async def _page(client: HTTPClient, path: str) -> bytes | None:
    """A page's body; None unless its status is 200. The server not answering at all is HTTPFailure."""
    status, body = await client.fetch("GET", path)
    return body if status == 200 else None


async def _json(client: HTTPClient, path: str) -> dict[str, Any] | None:
    body = await _page(client, path)
    try:
        value = None if body is None else msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


async def _has_post(client: HTTPClient, path: str) -> bool:
    """Whether there is a route that wants a POST: a GET is then the wrong method."""
    try:
        status, _ = await client.fetch("GET", path)
    except HTTPFailure:
        return False
    return status == 405


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
