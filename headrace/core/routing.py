"""What gateways, the router and the fleet's supervisor tell each other.

    gateway    ──► router   Attach (once, first), Place, Began, Release, Report, Ask
    router     ──► gateway  Fleet (at first and at every change), Placed, Refused, HandOver, Answer
    supervisor ──► router   Attach, SetEndpoint, RemoveEndpoint, Ask
    router     ──► supervisor  Fleet, Hung, Answer

In one process the same records are arguments of calls. Token streams never pass here: they flow between
gateway and replica.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.core.messages import Failed, Moves, Timing

Role = Literal["unified", "prefill", "decode"]
EngineKind = Literal["headrace", "vllm", "sglang", "tensorrt-llm", "llama-server", "openai"]
ReplicaState = Literal["starting", "ready", "draining", "down"]
BreakerState = Literal["closed", "open", "half-open"]
Outcome = Literal["finished", "aborted", "caller_fault", "replica_fault", "replica_gone"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica as it is reached: ``address`` is a Unix path for our own, a base URL for a server.

    ``kind`` None: to be recognised. ``model`` is the name that Headrace serves it under, ``remote_model``
    what the server calls it. ``max_in_flight`` 0: what it says of itself. ``overflow``: used only while
    the others are full. ``kv_events`` and ``kv_replay`` are ZeroMQ addresses of vLLM's event publisher.
    ``bootstrap_port`` is where a prefill server of SGLang's is met by decode servers. ``api_key_env`` names
    the environment variable that holds the server's key. ``draining``: takes nothing new; ``hand_over``:
    what runs there moves to others now.
    """

    replica_id: str
    model: str
    address: str
    kind: EngineKind | None = None
    remote_model: str = ""
    role: Role = "unified"
    hardware: str = ""
    price_per_hour: float = 0.0
    max_in_flight: int = 0
    overflow: bool = False
    text_only: bool = False
    kv_events: str = ""
    kv_replay: str = ""
    bootstrap_port: int = 0
    api_key_env: str = ""
    draining: bool = False
    hand_over: bool = False
    num_restarts: int = 0


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica's interface allows. ``limits`` says in words what this mode cannot do.

    ``tokens``: ids in and out. ``exact_rescue``: a broken stream of it can be continued as it would have
    gone on. ``cache_events``: it tells which blocks it holds. ``abort``: closing the connection or a call
    stops its work. ``load``: it tells queue and use. ``remote_model`` is what the server calls its model,
    ``path`` where requests with tokens go.
    """

    kind: EngineKind
    version: str = ""
    remote_model: str = ""
    path: str = ""
    tokens: bool = False
    exact_rescue: bool = False
    cache_events: bool = False
    abort: bool = False
    load: bool = False
    limits: list[str] = []


UNKNOWN_MODEL_LEN = 1 << 20
"""Where a server does not say how long a context may be, it has to refuse by itself."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know to turn text into requests for a model; from a replica's Hello or probe.

    Identities of prompts are computed from ``root_identity`` in blocks of ``block_size``.
    ``vocab_size`` 0 and no ``eos_token_ids``: known to the tokenizer alone. ``tokens`` False: every
    replica takes text only.
    """

    model: str
    max_model_len: int
    block_size: int
    root_identity: bytes
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    revision: str = ""
    tokens: bool = True


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as gateways see it. ``instance`` changes when its process does."""

    endpoint: Endpoint
    state: ReplicaState
    instance: str = ""
    capabilities: Capabilities | None = None


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the router needs to know of one request; no text, no tokens.

    ``block_ids`` are the packed 32-byte identities of the prompt's full blocks; for a request that is text
    only, of its text's chunks (``text_only``; ``num_prompt_tokens`` is then an estimate). ``caller_id`` is
    the id that the caller knows. ``exclude`` names replicas that failed it, ``attempt`` counts from 0.
    ``whole``: all of its prompt must be computed where it is answered.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    block_ids: bytes = b""
    caller_id: str = ""
    num_samples: int = 1
    max_tokens: int | None = None
    text_only: bool = False
    tier: str = "standard"
    session: str | None = None
    deadline: float | None = None
    attempt: int = 0
    exclude: list[str] = []
    whole: bool = False


class Placement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The router's answer: a replica and a lease on it, which ends with one Release.

    ``prefill_replica`` computes what it lacks of the prompt and hands it over at ``prefill_address``; empty:
    the replica does it itself. ``num_cached_tokens`` of the prompt are expected in its cache, ``ttft_s`` is
    the predicted time from now to the first token, ``queue_s`` how long the router held the request.
    """

    request_id: str
    replica_id: str
    num_cached_tokens: int = 0
    ttft_s: float = 0.0
    queue_s: float = 0.0
    prefill_replica: str = ""
    prefill_address: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A placement that runs, as a gateway tells a router that has just started."""

    route: Route
    placement: Placement
    began: bool


# From gateways and the supervisor


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """First on a connection: who it is, and the leases it holds from the router's former life."""

    peer: str
    leases: list[Lease] = []


class Place(msgspec.Struct, frozen=True, tag="place"):
    route: Route


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The first token arrived ``ttft_s`` after the placement; ``timing`` where the replica tells it."""

    request_id: str
    ttft_s: float
    num_cached_tokens: int
    timing: Timing | None = None


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Ends a lease, or a wait for one; exactly once for every Place that was not refused.

    ``num_output_tokens`` were received over ``decode_s`` seconds after the first. ``prefill_outcome``: what
    became of the prefill side of a pair, where the gateway has seen it fail.
    """

    request_id: str
    outcome: Outcome
    num_output_tokens: int = 0
    decode_s: float = 0.0
    prefill_outcome: Outcome | None = None


class SetEndpoint(msgspec.Struct, frozen=True, tag="set_endpoint"):
    """Adds a replica, or changes what is known of one."""

    endpoint: Endpoint


class RemoveEndpoint(msgspec.Struct, frozen=True, tag="remove_endpoint"):
    replica_id: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """A gateway's counters, from time to time, as its metrics module encodes them."""

    metrics: bytes


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """``status``: a FleetStatus; ``why``: Decisions about a request; ``reports``: all gateways' counters."""

    nonce: int
    what: Literal["status", "why", "reports"]
    request_id: str = ""


ToRouter = Attach | Place | Began | Release | SetEndpoint | RemoveEndpoint | Report | Ask


# From the router


class Fleet(msgspec.Struct, frozen=True, tag="fleet"):
    """All replicas and models as they are now."""

    members: list[Member]
    models: list[ModelInfo]


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    placement: Placement


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    failed: Failed


class HandOver(msgspec.Struct, frozen=True, tag="hand_over"):
    """What runs on this replica is to be moved to others now."""

    replica_id: str


class Hung(msgspec.Struct, frozen=True, tag="hung"):
    """A replica's process is there, holds requests and does not say a word: it is to be replaced."""

    replica_id: str
    pid: int


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``headrace ps``. Rates are tokens per second, times seconds, shares 0 to 1.

    ``ttft_s`` and ``predicted_ttft_s`` are means over recent requests, ``ttft_error_s`` the mean of their
    absolute difference; None, as for rates: nothing was measured yet. ``num_rescued`` requests moved away
    from it in mid-stream. Of those placed here, the prompts of ``num_split`` were computed by another
    replica, and of ``num_unsplit`` here although there was one. Tokens, prefix hits, preemptions and
    ``moves`` are counted by its present process.
    ``pack`` is the id of the kernels that it runs, empty: its engine's own.
    """

    member: Member
    num_in_flight: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefill_rate: float | None = None
    decode_rate: float | None = None
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    ttft_error_s: float | None = None
    num_placed: int = 0
    num_faults: int = 0
    num_rescued: int = 0
    num_split: int = 0
    num_unsplit: int = 0
    breaker: BreakerState = "closed"
    num_indexed_blocks: int = 0
    num_index_resets: int = 0
    num_preemptions: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    moves: Moves | None = None
    pack: str = ""
    note: str = ""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``scaled_to_zero`` names models that have no replica; the server's own process adds it."""

    policy: str
    replicas: list[ReplicaStatus]
    models: list[ModelInfo]
    num_queued: int
    gateways: list[str] = []
    scaled_to_zero: list[str] = []


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica as the policy saw it. ``score``: lower is better. ``excluded``: why it was left out.

    Of the prompt it has ``num_cached_tokens``, of which ``num_disk_tokens`` on disk;
    ``num_fetched_tokens`` would come from a prefill replica. ``fill_s``: bringing them into memory.
    """

    replica_id: str
    score: float = 0.0
    ttft_s: float = 0.0
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    num_fetched_tokens: int = 0
    fill_s: float = 0.0
    num_queued_tokens: int = 0
    num_in_flight: int = 0
    num_running: int = 0
    kv_cache_usage: float = 0.0
    excluded: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one placement of a request was decided, and what became of it. ``at`` is Unix time.

    ``prefill_replica`` computes the prompt for the chosen one; ``split`` says in words why, or why not
    (empty: there was no choice). ``num_fetched_tokens``, ``num_disk_tokens`` and ``fill_s`` came of it.
    """

    request_id: str
    caller_id: str
    model: str
    at: float
    policy: str
    attempt: int
    num_prompt_tokens: int
    candidates: list[Candidate]
    chosen: str
    reason: str
    queue_s: float = 0.0
    ttft_s: float | None = None
    num_cached_tokens: int | None = None
    outcome: Outcome | None = None
    prefill_replica: str = ""
    split: str = ""
    num_fetched_tokens: int | None = None
    num_disk_tokens: int | None = None
    fill_s: float | None = None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answers an Ask with the same nonce."""

    nonce: int
    status: FleetStatus | None = None
    decisions: list[Decision] = []
    reports: list[bytes] = []


FromRouter = Fleet | Placed | Refused | HandOver | Hung | Answer
