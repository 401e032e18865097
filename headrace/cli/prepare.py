"""Finds what a deployment names: weights for replicas, tokenizers for gateways, what workers serve."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.core.deployment import ModelDeployment, WorkerDeployment
from headrace.core.errors import ModelNotFoundError, StartupError, UsageError
from headrace.core.launch import ServedModelSpec
from headrace.models.resolve import find_tokenizer, resolve_model
from headrace.router.external.faults import refused_key

ASK_TIMEOUT_S = 5.0
MAX_MODELS_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose files are on this machine.

    ``folder`` holds weights if it has replicas, and the tokenizer; empty: there is none here, and
    ``text_reason`` says so. ``revision`` as in ``ResolvedModel``.
    """

    deployment: ModelDeployment
    folder: str
    revision: str = ""
    text_reason: str = ""

    def spec(self) -> ServedModelSpec:
        """It as a gateway is told of it."""
        deployment = self.deployment
        return ServedModelSpec(
            model=deployment.name,
            names=deployment.names,
            source=deployment.model,
            folder=self.folder,
            chat_template=deployment.chat_template,
        )

    def read_chat_template(self) -> str | None:
        """The text of the template that replaces the model's own; UsageError when there is no such file."""
        path = self.deployment.chat_template
        if path is None:
            return None
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template {path}: cannot be read: {error}") from error


def prepare(model: ModelDeployment, progress: Progress) -> Prepared:
    """Blocks while it fetches, converts and asks. Raises what ``resolve_model`` does, and StartupError."""
    if not model.names:
        name = _ask_name(model.workers)
        model = msgspec.structs.replace(model, names=[name], model=name)
    if model.replicas:
        dtype = "float32" if model.engine.dtype == "float32" else "bfloat16"
        try:
            resolved = resolve_model(
                model.model, dtype=dtype, quantization=model.engine.quantization, progress=progress
            )
        except ModelNotFoundError as error:
            if model.workers and not error.hint:
                error.hint = "Leave --replicas out to serve it from its workers alone."
            raise
        return Prepared(deployment=model, folder=str(resolved.folder), revision=resolved.revision)
    folder = find_tokenizer(model.model, progress=progress) if model.model else None
    if folder is not None:
        return Prepared(deployment=model, folder=str(folder))
    reason = (
        f"no tokenizer of {model.model or model.name!r} on this machine, so callers' text goes to the "
        "workers as it is; name a folder with its tokenizer.json as MODEL for token mode"
    )
    return Prepared(deployment=model, folder="", text_reason=reason)


def _ask_name(workers: list[WorkerDeployment]) -> str:
    """What the first worker that answers calls its model."""
    failures = []
    hint = "name it: headrace serve MODEL --worker-urls URL"
    for worker in workers:
        try:
            return _first_model(worker)
        except urllib.error.HTTPError as error:
            failures.append(f"{worker.url}: {error}")
            if error.code in (401, 403):
                refused = refused_key(worker.url, error.code, worker.api_key_env)
                failures[-1], hint = refused.message, refused.hint or hint
            error.close()
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            failures.append(f"{worker.url}: {error}")
    raise StartupError(
        f"no MODEL is given, and no worker says which it serves ({'; '.join(failures)})",
        hint=hint,
    )


def _first_model(worker: WorkerDeployment) -> str:
    request = urllib.request.Request(f"{worker.url}/v1/models")
    if key := os.environ.get(worker.api_key_env):
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as response:
        body = json.loads(response.read(MAX_MODELS_BYTES))
    name = body["data"][0]["id"]
    if not isinstance(name, str) or not name:
        raise ValueError("its /v1/models names no model")
    return name
