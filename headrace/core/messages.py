"""What travels between a gateway (or router) and a replica.

    gateway ──► replica    Submit, Abort, Drain, Probe, Subscribe
    replica ──► gateway    Hello (once, first), Step (one per engine step), Health (answers Probe),
                           CacheSnapshot (answers a Subscribe that cannot be answered by a replay)

    supervisor ──► replica    PreparePack ──► UsePack ──► RetirePack, AskStepTimes, AskRecorded, Score
    replica ──► supervisor    PackReady, PackUsed, PackRetired, StepTimes, Recorded, Scores: one answer each;
                              PackFailed instead of any of them

Every submitted request ends in exactly one Output with a ``finish_reason`` per sample, or in one Failed.
A connection hears of the cache and gets a Step for steps without outputs of its own only if it subscribed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.core.errors import (
    ContextLengthError,
    EngineError,
    HeadraceError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from headrace.core.request import Request

FinishReason = Literal["stop", "length", "abort"]


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """``sent_at`` is the sender's monotonic clock, which the processes of a machine share; 0: untold."""

    request: Request
    sent_at: float = 0.0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free its blocks before the next step; unknown ids are ignored.

    ``sample_index`` limits it to one sample (a stop string was found in it); None aborts all. An
    aborted request or sample gets no further message.
    """

    request_id: str
    sample_index: int | None = None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new request, finish what runs, then exit."""


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """Send stats and cache events from now on, beginning with event number ``next_seq``.

    ``instance`` is the process that counted so far (``Hello.instance``), empty for a first subscription.
    Events that the replica no longer keeps, or that another process counted, are replaced by one
    CacheSnapshot. May be sent again at any time: to heal a gap.
    """

    next_seq: int = 0
    instance: str = ""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    nonce: int


class PreparePack(msgspec.Struct, frozen=True, tag="prepare_pack"):
    """Build the pack in ``folder`` and lay out its weights, beside the step loop; nothing runs it yet."""

    pack_id: str
    folder: str


class UsePack(msgspec.Struct, frozen=True, tag="use_pack"):
    """Run a prepared pack from the next step on; empty: no pack."""

    pack_id: str


class RetirePack(msgspec.Struct, frozen=True, tag="retire_pack"):
    """Give back what a pack that is not in use holds; an unknown one is ignored."""

    pack_id: str


class AskStepTimes(msgspec.Struct, frozen=True, tag="ask_step_times"):
    """How long steps have taken since the pack in use came into use."""


class AskRecorded(msgspec.Struct, frozen=True, tag="ask_recorded"):
    """Tokens of requests that finished lately."""


class Score(msgspec.Struct, frozen=True, tag="score"):
    """How likely each token is after those before it, to each of ``pack_ids`` (empty: no pack), beside what
    is served.

    ``sequences`` are packed as ``Request.prompt`` is. They are computed ``groups`` at a time (such as 1, 2,
    5), ``chunk`` tokens of each a pass (0: all), over a cache of their own; the packs take turns.
    """

    sequences: list[bytes]
    groups: list[int]
    pack_ids: list[str]
    chunk: int
    num_top: int


ToReplica = (
    Submit
    | Abort
    | Drain
    | Probe
    | Subscribe
    | PreparePack
    | UsePack
    | RetirePack
    | AskStepTimes
    | AskRecorded
    | Score
)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token itself, its rank (1 = most likely), the best k."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Where a sample's time went inside the replica before its first token, in seconds.

    ``queue_s`` from when it was sent (or read, where that is untold) to the first step that computed for
    it, without ``fill_s``, the wait for blocks from elsewhere; ``prefill_s`` from there to its first token.
    Of the prompt, ``num_computed_tokens`` were computed here, ``num_fetched_tokens`` came from a prefill
    replica and ``num_disk_tokens`` from disk; the rest was cached.
    """

    queue_s: float
    prefill_s: float
    num_computed_tokens: int
    fill_s: float = 0.0
    num_fetched_tokens: int = 0
    num_disk_tokens: int = 0


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What computes a replica's tokens. ``form``: what became of the weights' numbers as they were loaded,
    beside ``quantization``, what was asked for; ``pack``: the id of its kernels, empty: stock operators.

    ``batch_invariant``: the kernels promise that a token's bits depend on the tokens before it alone. Then
    what has the same revision, dtype, form and pack, on the same hardware, gives the same bits.
    """

    revision: str
    dtype: str
    quantization: str
    form: str
    pack: str
    batch_invariant: bool
    hardware: str
    version: str
    torch: str


class Output(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sample of one request after one step.

    ``prompt_logprobs`` and ``timing`` come once, with the sample's first tokens; entry 0 of the former is
    None (nothing precedes the first token). ``stop_token`` is the id that ended it, when one did; that id
    is the last of ``token_ids``. ``num_cached_tokens`` is the prompt's length found in the prefix cache.
    ``origin`` comes where the request is recorded, with a sample's first tokens and whenever it changes.
    """

    request_id: str
    sample_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timing: Timing | None = None
    origin: Origin | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """A request that cannot be finished; ``status`` and ``kind`` as in ``core.errors``.

    ``retry_after``: seconds until another try makes sense, 0 where that says nothing.
    """

    request_id: str
    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int = 0

    @classmethod
    def of_error(cls, request_id: str, error: HeadraceError) -> Failed:
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        retry_after = error.retry_after if isinstance(error, OverloadedError) else 0
        return cls(request_id, error.status, error.kind, message, error.param, error.code, retry_after)

    def to_error(self) -> HeadraceError:
        """The error that it tells of; EngineError for a status that no request can cause."""
        if self.status == OverloadedError.status:
            retry_after = max(1, self.retry_after)
            return OverloadedError(self.message, retry_after=retry_after, param=self.param, code=self.code)
        kind: type[HeadraceError] = EngineError
        if self.code == ContextLengthError.default_code:
            kind = ContextLengthError
        else:
            for known in (InvalidRequestError, NotFoundError, UnavailableError):
                if self.status == known.status:
                    kind = known
        return kind(self.message, param=self.param, code=self.code)


Tier = Literal["memory", "disk"]


class BlocksStored(msgspec.Struct, frozen=True, tag="stored", omit_defaults=True):
    """Full blocks that can now be reused, in chain order, from memory or from disk."""

    block_ids: list[bytes]
    parent: bytes
    tier: Tier = "memory"


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed", omit_defaults=True):
    """Blocks that this tier does not hold any more."""

    block_ids: list[bytes]
    tier: Tier = "memory"


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared"):
    pass


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class Moves(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks that moved since the engine started, and what the disk tier holds now.

    ``fetched``: from prefill replicas; ``fetch_s`` is the time with a transfer open and ``fetch_overlap_s``
    the part of it during which the sender still computed. ``sent``: to decode replicas. ``damaged`` blocks
    failed a check and were dropped; ``refused`` ones the tier could not take.
    """

    num_filling: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    fetch_overlap_s: float = 0.0
    failed_fetches: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    disk_hit_blocks: int = 0
    disk_read_bytes: int = 0
    disk_read_s: float = 0.0
    disk_written_bytes: int = 0
    disk_refused_blocks: int = 0
    damaged_blocks: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's state now, and counters since it started.

    ``num_queued_tokens`` are prompt tokens of admitted requests that are not computed yet. ``moves`` is there
    once a block has moved. ``pack`` is the id of the kernels in use, empty: the engine's own.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    moves: Moves | None = None
    pack: str = ""

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks held by running requests, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """What a replica can do; sent first on every connection, once the model is loaded.

    ``instance`` is drawn anew by every process: another one has an empty cache. ``hardware`` is the class
    of machine in words, such as ``cpu x4 AMD EPYC 9654``.
    """

    replica_id: str
    pid: int
    model: str
    model_revision: str
    role: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    root_identity: bytes
    eos_token_ids: list[int]
    load_seconds: float
    weights_bytes: int
    kv_bytes: int
    notes: list[str]
    instance: str = ""
    hardware: str = ""
    # Which machine it runs on (``core.machine.host_id``), where peers fetch blocks (``unix:/path`` or
    # ``tcp://host:port``; empty: nowhere), what one takes, what it is made of (equal: interchangeable), and
    # which folder of which host is its disk tier.
    host_id: str = ""
    kv_address: str = ""
    kv_block_bytes: int = 0
    kv_format: str = ""
    kv_disk: str = ""
    # The kernels that it started with: their pack's id and folder; empty: the engine's own.
    pack: str = ""
    pack_folder: str = ""


class Step(msgspec.Struct, frozen=True, tag="step", omit_defaults=True):
    """One engine step. ``event_seq`` numbers the first of ``events``; each event takes one number."""

    outputs: list[Output]
    failed: list[Failed]
    stats: Stats
    events: list[CacheEvent] = []
    event_seq: int = 0


class Health(msgspec.Struct, frozen=True, tag="health"):
    nonce: int
    draining: bool
    stats: Stats


class CacheSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """All that the replica's cache holds: what was known of it before is void.

    ``next_seq`` is the number of the first event after it.
    """

    stored: list[BlocksStored]
    next_seq: int


class PackReady(msgspec.Struct, frozen=True, tag="pack_ready"):
    """It was prepared in ``seconds``, and can be used."""

    pack_id: str
    seconds: float


class PackUsed(msgspec.Struct, frozen=True, tag="pack_used"):
    pack_id: str


class PackRetired(msgspec.Struct, frozen=True, tag="pack_retired"):
    pack_id: str


class PackFailed(msgspec.Struct, frozen=True, tag="pack_failed"):
    """What was asked about packs cannot be done; everything is as it was."""

    failed: Failed


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """Median duration of the latest ``count`` steps that computed ``rows`` single tokens and nothing else."""

    rows: int
    count: int
    median_s: float


class StepTimes(msgspec.Struct, frozen=True, tag="step_times"):
    """Since ``pack_id`` (empty: no pack) came into use; ``num_steps`` of all kinds."""

    pack_id: str
    num_steps: int
    times: list[StepTime]


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """The beginnings of prompt plus output, packed as ``Request.prompt`` is, the latest first."""

    sequences: list[bytes]


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """What one pack makes of the sequences: an entry for every token of each but its first."""

    pack_id: str
    sequences: list[list[TokenLogprobs]]
    times: list[StepTime]


class Scores(msgspec.Struct, frozen=True, tag="scores"):
    """In the order of ``Score.pack_ids``."""

    scored: list[Scored]


FromReplica = (
    Hello
    | Step
    | Health
    | CacheSnapshot
    | PackReady
    | PackUsed
    | PackRetired
    | PackFailed
    | StepTimes
    | Recorded
    | Scores
)
