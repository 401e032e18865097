"""The engine: requests in, tokens out, one synchronous step at a time.

add ─► Scheduler ─► schedule ─► ModelRunner ─► sampled tokens ─► Scheduler.update ─► StepResult
                     abort, a swap of ops, blocks in and out of the cache (BlockMoves): between steps
                     tokens scored with a pack that is on trial (Scorer): between steps too
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.core.errors import EngineError, HeadraceError, InvalidRequestError
from headrace.core.identity import root_identity
from headrace.core.knobs import EngineConfig
from headrace.core.launch import MachineShare
from headrace.core.machine import num_cores
from headrace.core.messages import (
    BlocksStored,
    CacheEvent,
    Failed,
    Origin,
    Output,
    Score,
    Stats,
    Timing,
)
from headrace.core.request import Request
from headrace.core.version import __version__
from headrace.engine import memory
from headrace.engine.device import describe_device, find_device, hardware_class
from headrace.engine.free_cores import FreeCores
from headrace.engine.model_runner import KV_LAYOUT, KVGeometry, ModelRunner
from headrace.engine.moves import BlockMoves
from headrace.engine.packs import LoadPack, Packs, load_native_pack
from headrace.engine.prefill_only import Prefiller
from headrace.engine.recorded import Recorded
from headrace.engine.sampler import SampledBatch, Sampler
from headrace.engine.schedule import Schedule, SchedulerConfig
from headrace.engine.scheduler import Scheduler
from headrace.engine.scoring import Scorer
from headrace.engine.sequence import Sequence
from headrace.engine.start_kernels import Shipped, Started, StartKernels, describe_kernels
from headrace.engine.step_times import StepTimes
from headrace.kernels.table import OpTable
from headrace.kvcache.block_pool import BlockPool
from headrace.models.load import LoadedModel, load_model

log = logging.getLogger("headrace.engine")

# Who waits in line while nothing can be computed waits for blocks of others: looked at again so often.
_BLOCKED_S = 0.05
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass
class StepResult:
    """What one step brought: at most one Output per sample, and requests that cannot be finished."""

    outputs: list[Output] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


class Engine:
    """One model, its cache, and the requests it works on. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        *,
        revision: str = "",
        share: MachineShare | None = None,
        progress: Callable[[int, int], None] | None = None,
        wake: Callable[[], None] | None = None,
        load_pack: LoadPack | None = None,
        shipped: Shipped | None = None,
    ) -> None:
        """Loads the model in ``folder``; ``progress`` is told bytes of weights done and in all.

        ``wake`` is called from other threads whenever there may be something for ``step`` to do.
        ``load_pack`` loads packs that are named; None: native kernels, built by this machine's compiler.
        ``shipped`` is where those lie that need not be named.

        ``revision`` names the weights in block identities; empty: a digest of them is taken. ``share`` is
        what others leave to it; None: everything.

        Raises StartupErrors: the model cannot be loaded, does not fit, or the configuration is wrong.
        """
        started = time.monotonic()
        share = share or MachineShare()
        self.config = config
        self.device = find_device(config.device)
        self.num_threads = config.threads or max(1, num_cores() // share.num_replicas)
        torch.set_num_threads(self.num_threads)
        self._cores = FreeCores(self.num_threads)
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        load_pack = load_pack or load_native_pack
        free_before = memory.available_bytes(self.device, share)
        with StartKernels(
            config.pack, dtype=dtype, device=self.device, shipped=shipped or Shipped(), load=load_pack
        ) as kernels:

            def load(pack_formats: frozenset[str]) -> tuple[LoadedModel, Started, bool] | None:
                """None: stock operators would have to read weights in forms that are slow for them."""
                loaded = load_model(
                    folder,
                    dtype=dtype,
                    device=self.device,
                    quantization=config.quantization,
                    pack_formats=pack_formats,
                    revision=revision,
                    progress=progress,
                    free_bytes=free_before,
                )
                bound = kernels.bind(loaded.model)
                alone = bound.reads_alone(loaded.model)
                return (loaded, bound, alone) if alone or not pack_formats else None

            found = load(kernels.choose(folder)) or load(frozenset())
            assert found is not None
            loaded, started_with, alone = found
        self.packs = Packs(loaded.model, load_pack, wake or _nobody)
        pack = started_with.pack_id
        self.kernels = started_with.line  # in words, as it started
        self.packs.start_with(started_with.ops, pack)
        model_config = loaded.model.config
        self.vocab_size = model_config.vocab_size
        self.max_model_len = memory.resolve_max_model_len(
            config.max_model_len, model_config.max_position_embeddings
        )
        geometry = KVGeometry(list(model_config.kv_specs), config.block_size, dtype)
        weights_bytes = loaded.weights_bytes + loaded.model.ops.nbytes
        if alone:  # the kernels' own forms are read: the files' pages may go
            loaded.release()
            weights_bytes -= loaded.mapped_bytes
        free_bytes = min(free_before - weights_bytes, memory.available_bytes(self.device, share))
        self.kv_size = memory.size_kv_cache(
            config,
            self.max_model_len,
            geometry.bytes_per_block,
            free_bytes,
            on_card=self.device.type == "cuda",
        )
        root = root_identity(
            model_revision=loaded.revision,
            kv_dtype=str(dtype).removeprefix("torch."),
            kv_layout=KV_LAYOUT,
            block_size=config.block_size,
            weights_digest=loaded.form,
        )
        self.block_pool = BlockPool(
            self.kv_size.num_blocks, config.block_size, track_saved=config.kv_disk_gb > 0
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                block_size=config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            self.block_pool,
            root,
            loaded.eos_token_ids,
        )
        kv = geometry.allocate(self.kv_size.num_blocks, self.device)
        self.runner = ModelRunner(
            loaded.model, kv, config.block_size, Sampler(loaded.eos_token_ids), self.device
        )
        with torch.inference_mode():
            self.runner.warm_up()
        self.root = root
        # Blocks are exchanged, and found on disk, only where the same kernels computed them.
        self.kv_format = f"{geometry.format}/pack {pack[:16]}" if pack else geometry.format
        self.kv_block_bytes = geometry.bytes_per_block
        self.moves = BlockMoves(
            config,
            self.scheduler,
            self.runner.block_io,
            root=root,
            kv_format=self.kv_format,
            check=self._check,
            wake=wake or _nobody,
        )
        self.scorer = Scorer(loaded.model, geometry, self.device)
        self.step_times = StepTimes()  # of decode steps, since the kernels last changed
        self.recorded = Recorded()
        self._nothing_to_compute = False  # in the last step, and nothing was asked since
        self._pending_ops: OpTable | None = None
        self._num_steps = 0
        self._origin = Origin(
            revision=loaded.revision,
            dtype=str(dtype).removeprefix("torch."),
            quantization=config.quantization,
            form=loaded.form,
            pack=pack,
            batch_invariant=started_with.batch_invariant,
            hardware=hardware_class(self.device, self.num_threads),
            version=__version__,
            torch=str(torch.__version__),
        )
        self._seeds = _seeds(config.seed)
        self.hello_fields: dict[str, Any] = {
            "model_revision": loaded.revision,
            "device": describe_device(self.device, self.num_threads),
            "hardware": self._origin.hardware,
            "dtype": str(dtype).removeprefix("torch."),
            "vocab_size": self.vocab_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "block_size": config.block_size,
            "num_blocks": self.kv_size.num_blocks,
            "root_identity": root,
            "eos_token_ids": list(loaded.eos_token_ids),
            "load_seconds": time.monotonic() - started,
            "weights_bytes": weights_bytes,
            "kv_bytes": self.kv_size.nbytes,
            "kv_block_bytes": self.kv_block_bytes,
            "kv_format": self.kv_format,
            "kv_disk": self.moves.disk_name,
            "pack": pack,
            "pack_folder": started_with.folder,
            "notes": [
                *loaded.notes,
                started_with.line,
                f"KV cache sized by: {self.kv_size.reason}",
                *self.moves.notes,
            ],
        }

    @property
    def origin(self) -> Origin:
        """What computes tokens now."""
        return self._origin

    @property
    def has_work(self) -> bool:
        """Whether any request, or prompt for another replica, is unfinished."""
        return self.scheduler.has_work

    def wait_s(self) -> float | None:
        """How long the caller may sleep before it calls ``step``: 0: not at all; None: until it is woken.

        A sequence that waits for blocks from elsewhere leaves nothing to do while it is unfinished.
        """
        if self.scorer.busy:
            return 0.0
        moves = self.moves.wait_s()
        if not self.scheduler.num_in_line:
            return moves
        if not self._nothing_to_compute:
            return 0.0
        return _BLOCKED_S if moves is None else min(moves, _BLOCKED_S)

    @property
    def prefiller(self) -> Prefiller:
        """What a connector's server hands the prompts of other replicas to."""
        return self.moves.prefiller

    def add(self, request: Request, sent_at: float = 0.0) -> list[Sequence]:
        """Puts a request in line. Raises InvalidRequestError or ContextLengthError, and adds nothing then.

        ``sent_at`` is when it set out, on the monotonic clock; 0: now.
        """
        self._check(request)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=next(self._seeds))
        if request.record and sampling.logprobs is None:
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        request = msgspec.structs.replace(request, sampling=sampling)
        samples = self.scheduler.add(request)
        self._nothing_to_compute = False
        now = time.monotonic()
        for sequence in samples:
            sequence.added_at = min(sent_at or now, now)
        return samples

    def abort(self, request_id: str, sample_index: int | None = None) -> int:
        """Ends a request, or one sample, and frees its blocks; returns how many samples ended."""
        ended = self.scheduler.abort(request_id, sample_index)
        self._nothing_to_compute = False
        self.moves.sweep()
        return len(ended)

    def step(self) -> StepResult:
        """Schedules, computes and books one step. A failure of the model ends that step's requests only."""
        if self._pending_ops is not None:
            self._swap_ops(self._pending_ops)
            self._pending_ops = None
        result = StepResult()
        started = time.monotonic()
        self.moves.before_step()
        schedule = self.scheduler.schedule()
        self._nothing_to_compute = not schedule.entries
        if schedule.entries:
            torch.set_num_threads(self._cores.threads())
            self._compute(schedule, result)
            self._cores.step_ended()
        self.moves.after_step()
        if self.scorer.busy:
            # no longer than what it stands beside
            self.scorer.advance(time.monotonic() - started)
        return result

    def take_events(self) -> tuple[int, list[CacheEvent]]:
        """Cache events of memory and disk since the last call, and the number of the first."""
        self.block_pool.add_events(self.moves.take_events())
        return self.block_pool.take_events()

    def snapshot(self) -> list[BlocksStored]:
        """All that can be reused now, in memory and on disk: what the events up to now come to."""
        return self.block_pool.snapshot() + self.moves.snapshot()

    def set_ops(self, ops: OpTable) -> None:
        """Exchanges the model's ops at the next step's start; what other ops computed is not reused then."""
        self._pending_ops = ops

    def use_pack(self, pack_id: str) -> None:
        """Runs a prepared pack from the next step on; empty: none. Raises NotFoundError."""
        ops = self.packs.table(pack_id)
        if pack_id != self.packs.active:
            self._swap_ops(ops, pack_id)
            self.packs.active = pack_id
            self.step_times.clear()

    def score(self, score: Score) -> None:
        """Begins to score tokens, a pass beside each step; ``scorer.take`` tells what came of it. Raises
        NotFoundError or InvalidRequestError."""
        self.scorer.begin(score, [self.packs.table(pack_id) for pack_id in score.pack_ids])

    def stats(self) -> Stats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_blocks=self.block_pool.num_blocks,
            num_free_blocks=self.block_pool.num_free,
            num_preemptions=counters.num_preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            prompt_tokens=counters.prompt_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_steps=self._num_steps,
            moves=self.moves.stats(),
            pack=self.packs.active,
        )

    def close(self) -> None:
        """Ends what moves blocks; writes what is cached to the disk tier first, for a few seconds at most."""
        self.moves.close()

    def check_integrity(self) -> None:
        """Asserts that no block is lost or held twice."""
        self.scheduler.check_integrity()
        self.moves.check_integrity()

    def _swap_ops(self, ops: OpTable, pack_id: str = "custom") -> None:
        if ops.provenance != self.runner.model.ops.provenance:
            self.scheduler.reset_prefix_cache()
            self.moves.disable("the kernels were exchanged, and blocks of others would not match")
        self.runner.model.ops = ops
        _, invariant = describe_kernels(self.packs.table(""), ops, self.runner.model)
        self._origin = msgspec.structs.replace(self._origin, pack=pack_id, batch_invariant=invariant)

    def _check(self, request: Request) -> None:
        """Raises InvalidRequestError for what this model cannot take, whoever asks."""
        request.sampling.validate(self.vocab_size)
        if request.adapter is not None:
            raise InvalidRequestError(
                f"this replica serves no adapters, got {request.adapter!r}", param="adapter"
            )
        if len(request.prompt) % 4:
            raise InvalidRequestError(
                f"a prompt is 4 bytes a token, got {len(request.prompt)} bytes", param="prompt"
            )
        highest = max(request.token_ids(), default=0)
        if highest >= self.vocab_size:
            raise InvalidRequestError(
                f"token ids must be below the vocabulary's {self.vocab_size}, got {highest}", param="prompt"
            )

    def _compute(self, schedule: Schedule, result: StepResult) -> None:
        self._num_steps += 1
        started = time.monotonic()
        for sequence in schedule.admitted:
            sequence.started_at = started
        try:
            with torch.inference_mode():
                sampled = self.runner.execute(schedule)
        except Exception as error:
            log.exception("step %d failed", self._num_steps)
            self._fail_all(schedule, error, result)
            return
        sampling = [entry.sequence for entry in schedule.entries if entry.samples]
        if sampled.invalid or sampled.invalid_prompts:
            invalid = [sampling[index] for index in sampled.invalid]
            self._fail_invalid(invalid + sampled.invalid_prompts, result)
        self.scheduler.update(schedule, sampled.token_ids)
        self._collect(sampling, sampled, result)
        if schedule.num_decodes == len(schedule.entries):
            self.step_times.add(schedule.num_decodes, time.monotonic() - started)
        num_prompt_tokens = schedule.num_tokens - schedule.num_decodes
        if num_prompt_tokens > schedule.num_decodes:
            self.moves.prefill_rate.add(num_prompt_tokens, time.monotonic() - started)

    def _collect(self, sampling: list[Sequence], sampled: SampledBatch, result: StepResult) -> None:
        failed = {failed.request_id for failed in result.failed}
        outputs = result.outputs
        now = time.monotonic()
        for index, (sequence, token) in enumerate(zip(sampling, sampled.token_ids, strict=True)):
            if failed and sequence.request_id in failed:
                continue
            prompt_logprobs, timing, origin = None, None, None
            if sequence.num_sampled_tokens == 1:
                timing = Timing(
                    max(0.0, sequence.started_at - sequence.added_at - sequence.fill_s),
                    now - sequence.started_at,
                    sequence.prompt_length - sequence.num_hit_tokens,
                    sequence.fill_s,
                    sequence.num_fetched_blocks * self.config.block_size,
                    sequence.num_disk_blocks * self.config.block_size,
                )
                if sequence.sampling.prompt_logprobs is not None:
                    row = self.runner.sampler.row(sequence)
                    gathered, row.prompt_logprobs = row.prompt_logprobs, None
                    assert gathered is not None
                    prompt_logprobs = gathered.entries
            if sequence.finish_reason is not None:
                self.recorded.add(sequence.tokens)
            if sequence.records and sequence.origin is not self._origin:
                origin = sequence.origin = self._origin
            logprob = sampled.logprobs.get(index)
            outputs.append(
                Output(
                    sequence.request_id,
                    sequence.sample_index,
                    [token],
                    sequence.finish_reason,
                    sequence.stop_token,
                    sequence.num_cached_tokens,
                    None if logprob is None else [logprob],
                    prompt_logprobs,
                    timing,
                    origin,
                )
            )

    def _fail_all(self, schedule: Schedule, error: Exception, result: StepResult) -> None:
        cause = (
            error
            if isinstance(error, HeadraceError)
            else EngineError(f"the model failed in this step: {type(error).__name__}: {error}")
        )
        for entry in schedule.entries:
            self._fail(entry.sequence, cause, result)

    def _fail_invalid(self, sequences: list[Sequence], result: StepResult) -> None:
        """Ends requests whose logits are NaN, and takes NaN out of their blocks: masked or not, a slot that
        holds one makes NaN of whoever reads it, and blocks are handed on as they are."""
        spoiled = self.runner.wipe_spoiled({block for s in sequences for block in s.block_table})
        if spoiled:
            self.scheduler.forget_cached()
            self.block_pool.add_events([*self.moves.snapshot()])
        for sequence in [*sequences, *self.scheduler.holders(spoiled)]:
            self._fail(sequence, EngineError("the model gave no valid logits (NaN) for this request"), result)

    def _fail(self, sequence: Sequence, error: HeadraceError, result: StepResult) -> None:
        """Ends all samples of a request and reports it, once; a prompt of another replica to that one."""
        if sequence.prefill_only:
            self.moves.prompt_failed(sequence, error.message)
            return
        if self.scheduler.abort(sequence.request_id):
            result.failed.append(Failed.of_error(sequence.request_id, error))


def _nobody() -> None:
    """Wakes nobody: the caller asks ``wait_s`` again by itself."""


def _seeds(seed: int | None) -> Iterator[int]:
    """Seeds for requests that bring none: drawn by the system, or a fixed row that begins at ``seed``."""
    for count in itertools.count():
        yield secrets.randbits(63) if seed is None else (seed + _SEED_STEP * count) % 2**63
