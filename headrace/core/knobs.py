"""Every setting, described once: flags, environment variables, file keys, help and docs follow from here.

A field's ``Meta`` holds its description and range; ``extra`` holds its ``heat``, which says what touching
it costs:

    cold   safe defaults, changed for a reason of your own (addresses, names, limits)
    warm   trades one figure for another; measure before and after
    hot    changes memory or numerics; a wrong value costs latency, quality or the start itself
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.core.packs import AUTO

PositiveInt = Annotated[int, Meta(ge=1)]
NonEmpty = Annotated[str, Meta(min_length=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


def _knob(description: str, heat: str, *, word: str = "", **limits: Any) -> Meta:
    """``word`` stands for the value in the help; empty: by its type."""
    return Meta(description=description, extra={"heat": heat, "word": word}, **limits)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica's engine is told. ``model`` is resolved to a local folder before this is sent."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _knob("Type of weights and activations; auto: bfloat16. float32 is the reference.", "hot"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        _knob("Where the model runs; auto: cuda when there is one.", "cold"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8"],
        _knob(
            "A quantized file's weights: auto (as stored, where the kernels in use read them), none (as "
            "numbers of the dtype); int8: any weights rounded to 8 bits, in groups of 32 where the kernels "
            "read that, else per output channel.",
            "hot",
        ),
    ] = "auto"
    pack: Annotated[
        str,
        _knob(
            "Kernels to run: auto (the best shipped pack that fits this CPU and model), none (torch's own "
            "operators), or the folder of a pack.",
            "hot",
            word="PACK",
            min_length=1,
        ),
    ] = AUTO
    max_model_len: Annotated[
        PositiveInt | None,
        _knob("Longest prompt plus output in tokens; default: what the model was made for.", "warm"),
    ] = None
    max_num_seqs: Annotated[int, _knob("Sequences that run at once.", "warm", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[
        int,
        _knob(
            "Tokens computed in one step; larger: faster prompts, longer gaps between tokens.", "warm", ge=1
        ),
    ] = 1024
    block_size: Annotated[int, _knob("Tokens in one block of the KV cache.", "warm", ge=1, le=1024)] = 32
    kv_cache_gib: Annotated[
        PositiveFloat | None,
        _knob(
            "Memory for the KV cache; default: what max_num_seqs needs, within half of what is free and, "
            "on a CPU, 4 GiB.",
            "warm",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, _knob("Reuse the blocks of a prefix that was computed before.", "warm")
    ] = True
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        _knob(
            "CPU threads of the engine, fewer while other processes use the cores; default: every core.",
            "warm",
        ),
    ] = None
    kv_disk_gb: Annotated[
        float,
        _knob(
            "Disk space for blocks that are pushed out of memory, shared by the replicas of a host; 0: none.",
            "warm",
            ge=0,
            le=1e6,
        ),
    ] = 0.0
    kv_disk_path: Annotated[
        str | None,
        _knob("Folder of those blocks; default: headrace/kv under the user's cache.", "cold", word="DIR"),
    ] = None
    kv_connector: Annotated[
        Literal["auto", "shm", "tcp"],
        _knob("How blocks move between replicas; auto: shared memory on one host, else TCP.", "cold"),
    ] = "auto"
    seed: Annotated[
        int | None, _knob("Draws the seeds of requests that bring none; default: not repeatable.", "cold")
    ] = None


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the front door is told."""

    host: Annotated[str, _knob("Address to listen on.", "cold", word="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, _knob("Port to listen on; 0 takes a free one.", "cold", ge=0, le=65535)] = 8000
    api_key: Annotated[
        list[str], _knob("Key that callers must send as a bearer token; may be repeated.", "cold", word="KEY")
    ] = []
    served_model_name: Annotated[
        str | None, _knob("Model name in the API; default: the name given.", "cold", word="NAME")
    ] = None
    chat_template: Annotated[
        str | None, _knob("File with a Jinja chat template, instead of the model's own.", "cold", word="FILE")
    ] = None
    max_body_mb: Annotated[float, _knob("Largest request body.", "cold", gt=0, le=1024)] = 32.0
    max_concurrent_requests: Annotated[
        int, _knob("Requests admitted at once, running or queued; more get a 429.", "warm", ge=1)
    ] = 256
    chat_template_timeout_s: Annotated[
        float, _knob("Longest time one chat template may take.", "cold", gt=0)
    ] = 5.0
    max_response_backlog_mb: Annotated[
        float, _knob("Unread output after which a slow reader is cut off.", "cold", gt=0)
    ] = 16.0
    record: Annotated[
        NonEmpty | None,
        _knob(
            "Folder in which finished answers are recorded, prompts included, for `headrace replay`; "
            "default: none is.",
            "cold",
            word="DIR",
        ),
    ] = None
    record_answers: Annotated[
        int, _knob("Answers kept in that folder; the oldest are dropped.", "cold", ge=1)
    ] = 1000
    record_mb: Annotated[float, _knob("Megabytes kept in that folder.", "cold", gt=0)] = 256.0
    shutdown_grace_s: Annotated[
        float, _knob("Time that running requests get to finish on SIGTERM.", "cold", ge=0)
    ] = 30.0


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests find their replica."""

    routing_policy: Annotated[
        Literal["predicted_ttft", "round_robin", "random", "least_load", "power_of_two", "prefix_only"],
        _knob("How a replica is chosen; the others are there to compare with.", "warm"),
    ] = "predicted_ttft"
    max_queue: Annotated[
        int, _knob("Requests that wait in the router while every replica is full.", "warm", ge=0)
    ] = 1024
    queue_timeout_s: Annotated[
        float, _knob("Longest wait in the router's queue before a 429.", "warm", gt=0)
    ] = 60.0
    replica_timeout_s: Annotated[
        float,
        _knob(
            "Silence after which a replica that holds requests is given up and they move on.", "warm", gt=0
        ),
    ] = 60.0
    max_rescues: Annotated[
        int, _knob("Times that one request may move to another replica.", "cold", ge=0, le=16)
    ] = 3
    retry_budget: Annotated[
        float,
        _knob("Retries after a living replica's fault, as a share of requests.", "cold", ge=0, le=1),
    ] = 0.2
    max_index_blocks: Annotated[
        int, _knob("Blocks that the prefix index remembers of one replica.", "cold", ge=1)
    ] = 1_000_000
    index_ttl_s: Annotated[
        float,
        _knob(
            "Time after which a guess about the cache of a server without cache events is dropped.",
            "warm",
            gt=0,
        ),
    ] = 600.0


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which processes stand behind the front door."""

    replicas: Annotated[
        Annotated[int, Meta(ge=0, le=64)] | None,
        _knob(
            "Local replicas of the model, which share the cores; default: 1, or none beside --worker-urls.",
            "warm",
        ),
    ] = None
    prefill: Annotated[
        int, _knob("Local replicas that only compute prompts, for the decode replicas.", "warm", ge=0, le=64)
    ] = 0
    decode: Annotated[
        int, _knob("Local replicas that take blocks from the prefill replicas.", "warm", ge=0, le=64)
    ] = 0
    gateways: Annotated[
        int,
        _knob("Gateway processes; above 1 the router gets a process of its own.", "warm", ge=1, le=64),
    ] = 1
    worker_urls: Annotated[
        list[str],
        _knob(
            "Base URL of an inference server to put behind the gateway; may be repeated.", "cold", word="URL"
        ),
    ] = []
    overflow_urls: Annotated[
        list[str],
        _knob("The same, used only while the others are full; may be repeated.", "cold", word="URL"),
    ] = []
    worker_api_key_env: Annotated[
        str | None,
        _knob("Environment variable that holds the key of those servers.", "cold", word="VARIABLE"),
    ] = None


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes speak of themselves, on stderr."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _knob("Least severe message to print.", "cold")
    ] = "info"
    log_json: Annotated[bool, _knob("One JSON object a line instead of text.", "cold")] = False
    stats_interval_s: Annotated[
        float, _knob("Seconds between lines of throughput while busy; 0: none.", "cold", ge=0)
    ] = 10.0
