"""What `headrace serve` says: of each model as it starts, and of throughput while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from headrace.cli.console import Printer, gib
from headrace.core.deployment import ModelDeployment
from headrace.core.messages import Hello
from headrace.core.routing import FleetStatus, ReplicaStatus


def print_model(
    printer: Printer,
    model: ModelDeployment,
    hellos: Mapping[str, Hello],
    workers: Mapping[str, ReplicaStatus],
    *,
    heading: bool,
    text_reason: str = "",
) -> None:
    """One block: what was chosen for its replicas (told once where they are alike) and its workers.

    ``text_reason``: why its callers' text is passed on as it is.
    """
    if heading:
        also = f" (also {', '.join(model.names[1:])})" if len(model.names) > 1 else ""
        printer.line(f"{model.name}{also}:")
    told: dict[tuple[str, ...], list[str]] = {}
    for replica in model.replicas:
        if replica.id in hellos:
            told.setdefault(tuple(_choices(hellos[replica.id])), []).append(replica.id)
    for lines, ids in told.items():
        if len(model.replicas) > 1:
            each = ", each with:" if len(ids) > 1 else ":"
            printer.line(f"{'replicas' if len(ids) > 1 else 'replica'} {', '.join(ids)}{each}")
        for line in lines:
            printer.line(line)
    for worker in model.workers:
        printer.line(f"worker {worker.id}: {_worker_state(workers.get(worker.id))}")
    if text_reason:
        printer.line(f"text mode: {text_reason}")


def _choices(hello: Hello) -> list[str]:
    tokens = hello.num_blocks * hello.block_size
    return [
        *hello.notes,
        f"memory: weights {gib(hello.weights_bytes)}, KV cache up to {gib(hello.kv_bytes)}",
        f"KV cache: {tokens:,} tokens, {tokens / hello.max_model_len:.1f} requests of max length "
        f"({hello.max_model_len:,}); loaded as {hello.dtype} on {hello.device}",
        *([f"role {hello.role}"] if hello.role != "unified" else []),
    ]


def _worker_state(status: ReplicaStatus | None) -> str:
    if status is None or status.member.state != "ready" or status.member.capabilities is None:
        reason = status.note if status is not None and status.note else "does not answer yet"
        return f"{reason}; serving without it and trying again"
    member = status.member
    capabilities = status.member.capabilities
    version = f" {capabilities.version}" if capabilities.version else ""
    mode = "tokens" if capabilities.tokens and not member.endpoint.text_only else "text"
    role = ", used as overflow" if member.endpoint.overflow else ""
    limits = f"; {'; '.join(capabilities.limits)}" if capabilities.limits else ""
    return f"{capabilities.kind}{version}, {mode} in and out{role}{limits}"


def curl_line(address: str, model: str, *, chat: bool, has_key: bool) -> str:
    """A command to copy that the model answers."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_key else ""
    if chat:
        path, body = (
            "chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": "Name the capital of France."}],
                "temperature": 0,
            },
        )
    else:
        path, body = (
            "completions",
            {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
        )
    return f"try: curl {address}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


class Counts(msgspec.Struct, frozen=True):
    """Tokens and prefix hits of one replica process, counted since it started."""

    prompt: int = 0
    generation: int = 0
    queries: int = 0
    hits: int = 0


class Throughput:
    """Turns one FleetStatus after the other into lines of throughput, summed over replicas."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Counts] = {}

    def line(self, status: FleetStatus, seconds: float) -> str | None:
        """What happened in the ``seconds`` since the last call; None when nothing did."""
        now: dict[tuple[str, str], Counts] = {}
        for replica in status.replicas:
            # A process that replaced another counts from zero.
            key = (replica.member.endpoint.replica_id, replica.member.instance)
            now[key] = Counts(
                replica.computed_prompt_tokens,
                replica.generation_tokens,
                replica.prefix_cache_queries,
                replica.prefix_cache_hits,
            )
        total = Counts(
            *(
                sum(
                    max(0, getattr(counts, name) - getattr(self._last.get(key, Counts()), name))
                    for key, counts in now.items()
                )
                for name in Counts.__struct_fields__
            )
        )
        self._last = now
        if not total.prompt and not total.generation:
            return None
        return (
            f"prompt {total.prompt / seconds:.0f} tok/s, generation {total.generation / seconds:.0f} tok/s, "
            f"running {_sum(status, 'num_running')}, "
            f"waiting {status.num_queued + _sum(status, 'num_waiting')}, "
            f"KV {_kv_usage(status):.1f} %, "
            f"prefix hits {100 * total.hits / total.queries if total.queries else 0:.0f} %"
        )


def _sum(status: FleetStatus, name: str) -> int:
    return sum(getattr(replica, name) for replica in status.replicas)


def _kv_usage(status: FleetStatus) -> float:
    """Mean over the replicas that tell it, in percent."""
    shares: Sequence[float] = [
        replica.kv_cache_usage
        for replica in status.replicas
        if replica.member.capabilities is not None and replica.member.capabilities.load
    ]
    return 100 * sum(shares) / len(shares) if shares else 0.0
