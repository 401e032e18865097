"""serve: serve a model behind the OpenAI-compatible API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.config_file import FileValue, read_config_file
from headrace.cli.console import Printer, gib
from headrace.cli.flags import add_flags, check_names, load_config, non_defaults
from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig, GatewayConfig, LogConfig
from headrace.core.logs import set_up_logging
from headrace.core.messages import Hello, Stats
from headrace.core.version import __version__
from headrace.models.packages import DEFAULT_MODEL

if TYPE_CHECKING:
    from headrace.router.replica_client import ReplicaClient

CONFIGS = (EngineConfig, GatewayConfig, LogConfig)
READY_TIMEOUT_S = 30.0

log = logging.getLogger("headrace")


class Settings(msgspec.Struct, frozen=True):
    """All that one server was told."""

    model: str
    engine: EngineConfig
    gateway: GatewayConfig
    logs: LogConfig
    warnings: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"short name, folder, .gguf file or hub id (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings; flags and HEADRACE_* variables beat it"
    )
    add_flags(parser, "engine", EngineConfig)
    add_flags(parser, "gateway", GatewayConfig)
    add_flags(parser, "log", LogConfig)


def main(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments, os.environ)
    set_up_logging(settings.logs)
    import uvloop

    uvloop.run(_serve(settings, Printer(as_log=settings.logs.log_json)))
    return 0


def load_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Flag beats environment beats file. Raises UsageError on whatever is wrong in any of them."""
    file: dict[str, FileValue] = read_config_file(Path(arguments.config)) if arguments.config else {}
    model = file.pop("model", None)
    flags = vars(arguments)
    warnings = check_names(CONFIGS, environment, file)
    return Settings(
        model=arguments.model or (str(model.value) if model else DEFAULT_MODEL),
        engine=load_config(EngineConfig, flags, environment, file),
        gateway=load_config(GatewayConfig, flags, environment, file),
        logs=load_config(LogConfig, flags, environment, file),
        warnings=warnings,
    )


async def _serve(settings: Settings, printer: Printer) -> None:
    """Claims the port, loads text and weights side by side, then serves until a signal."""
    started = time.monotonic()
    from headrace.fleet.local import LocalReplica
    from headrace.gateway.server import bind_socket, serve
    from headrace.models.resolve import resolve_model
    from headrace.router.replica_client import ReplicaClient
    from headrace.text.tokenizer import Tokenizer

    printer.line(f"headrace {__version__}, model {settings.model}")
    changed = [
        line for part in (settings.engine, settings.gateway, settings.logs) for line in non_defaults(part)
    ]
    if changed:
        printer.line("set: " + ", ".join(changed))
    for warning in settings.warnings:
        printer.warning(warning)
    socket = bind_socket(settings.gateway)
    dtype = "float32" if settings.engine.dtype == "float32" else "bfloat16"
    with printer.progress() as progress:
        model = await asyncio.to_thread(resolve_model, settings.model, dtype=dtype, progress=progress)
        replica = LocalReplica(
            replica_id="replica-0",
            model=settings.model,
            folder=model.folder,
            revision=model.revision,
            engine=settings.engine,
            logs=settings.logs,
            on_loading=lambda done, total: progress("loading weights", done, total),
        )
        loading = asyncio.create_task(replica.start())
        try:
            tokenizer = await asyncio.to_thread(
                Tokenizer.from_folder,
                model.folder,
                chat_template=_read_template(settings.gateway),
                template_timeout_s=settings.gateway.chat_template_timeout_s,
            )
        except BaseException:
            loading.cancel()
            with contextlib.suppress(BaseException):
                await loading
            raise
        await loading
    client = ReplicaClient(replica.socket, log=log, on_hang=replica.kill)
    client.start()
    reporter: asyncio.Task[None] | None = None
    try:
        hello = await client.wait_ready(READY_TIMEOUT_S)
        _print_choices(printer, hello)
        reporter = asyncio.create_task(_report(client, settings.logs.stats_interval_s))
        name = settings.gateway.served_model_name or settings.model

        def on_ready(address: str) -> None:
            printer.line(
                f"running on {address} (Ctrl+C to quit), {time.monotonic() - started:.1f} s after the start"
            )
            printer.line(
                _curl_line(address, name, tokenizer.has_chat_template, bool(settings.gateway.api_key))
            )

        await serve(
            settings.gateway,
            tokenizer=tokenizer,
            client=client,
            model_name=settings.model,
            served_names=[name],
            log=log,
            on_ready=on_ready,
            socket=socket,
        )
    finally:
        if reporter is not None:
            reporter.cancel()
        await client.close()
        await replica.stop(settings.gateway.shutdown_grace_s)
        tokenizer.close()


def _read_template(config: GatewayConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {config.chat_template}: cannot be read: {error}") from error


def _print_choices(printer: Printer, hello: Hello) -> None:
    for note in hello.notes:
        printer.line(note)
    tokens = hello.num_blocks * hello.block_size
    printer.line(f"memory: weights {gib(hello.weights_bytes)}, KV cache up to {gib(hello.kv_bytes)}")
    printer.line(
        f"KV cache: {tokens:,} tokens, {tokens / hello.max_model_len:.1f} requests of max length "
        f"({hello.max_model_len:,}); loaded in {hello.load_seconds:.1f} s as {hello.dtype} on {hello.device}"
    )


def _curl_line(address: str, model: str, has_chat_template: bool, has_key: bool) -> str:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_key else ""
    if has_chat_template:
        path, body = (
            "chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            },
        )
    else:
        path, body = (
            "completions",
            {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
        )
    return f"try: curl {address}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


async def _report(client: ReplicaClient, interval_s: float) -> None:
    """One line of throughput an interval; silent when nothing happened."""
    if interval_s <= 0:
        return
    last = client.stats
    while True:
        await asyncio.sleep(interval_s)
        now = client.stats
        if now.num_steps < last.num_steps:
            last = Stats()  # another replica process, which counts from zero
        if now.num_steps > last.num_steps:
            log.info("%s", throughput_line(last, now, interval_s))
        last = now


def throughput_line(last: Stats, now: Stats, seconds: float) -> str:
    """What happened between two Stats ``seconds`` apart."""
    queries = now.prefix_cache_queries - last.prefix_cache_queries
    hits = now.prefix_cache_hits - last.prefix_cache_hits
    return (
        f"prompt {(now.computed_prompt_tokens - last.computed_prompt_tokens) / seconds:.0f} tok/s, "
        f"generation {(now.generation_tokens - last.generation_tokens) / seconds:.0f} tok/s, "
        f"running {now.num_running}, waiting {now.num_waiting}, "
        f"KV {100 * now.kv_cache_usage:.1f} %, prefix hits {100 * hits / queries if queries else 0:.0f} %"
    )
