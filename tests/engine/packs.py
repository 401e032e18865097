"""Packs whose kernels are Python: what a pack of native code does, done by a test."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import PackError
from headrace.kernels.table import OpTable
from headrace.models.causal_lm import CausalLM


def write_pack(folder: Path, kind: str, **settings: Any) -> str:
    """A folder that ``load`` makes a table of; returns its id. ``kind``: ``same`` computes what is computed
    anyway, ``slow`` takes ``seconds`` longer a step, ``wrong`` adds ``error`` to the likeliest logit of one
    row in ``every``, ``broken`` cannot be built, ``raises`` does so when it is called, ``dies`` ends the
    process ``after`` so many calls. ``prepare_s``: how long it takes to build."""
    folder.mkdir(parents=True)
    body = json.dumps({"kind": kind, **settings}).encode()
    (folder / "pack.json").write_bytes(body)
    return hashlib.sha256(body).hexdigest()


def load(folder: Path, ops: OpTable, model: CausalLM) -> OpTable:
    """A ``LoadPack``."""
    body = (folder / "pack.json").read_bytes()
    settings = json.loads(body)
    time.sleep(settings.get("prepare_s", 0.0))
    if settings["kind"] == "broken":
        raise PackError("g++: error: nothing can be made of this")
    head = ops.logits_head
    return ops.replace(source=hashlib.sha256(body).hexdigest(), logits_head=_head(head, settings))


def _head(head: Callable[..., Tensor], settings: dict[str, Any]) -> Callable[..., Tensor]:
    num_rows = num_calls = 0
    kind = settings["kind"]

    def logits_head(hidden: Tensor, *rest: Any) -> Tensor:
        nonlocal num_rows, num_calls
        num_calls += 1
        if kind == "raises":
            raise ValueError("a kernel of its own mind")
        if kind == "dies" and num_calls > settings["after"]:
            import os

            os._exit(139)
        if kind == "slow":
            time.sleep(settings["seconds"])
        logits = head(hidden, *rest)
        if kind == "wrong":
            for row in range(len(logits)):
                num_rows += 1
                if num_rows % settings["every"] == 0:
                    logits[row, int(torch.argmax(logits[row]))] += settings["error"]
        return logits

    return logits_head
