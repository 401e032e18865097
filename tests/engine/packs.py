"""Packs whose kernels are Python: what a pack of native code does, done by a test."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import PackError
from headrace.kernels.table import OpTable
from headrace.models.causal_lm import CausalLM
from tests.engine import rowwise


def write_pack(folder: Path, kind: str, **settings: Any) -> str:
    """A folder that ``load`` makes a table of; returns its id.

    same    computes what is computed anyway      slow    takes ``seconds`` longer a step
    wrong   adds ``error`` to the likeliest logit of one row in ``every`` (1: all logits, as a share of them)
    broken  cannot be built                       rare    cannot be built a second time
    raises  does so when it is called             dies    ends the process
    rowwise computes each row by itself, in float32: the same bits in any batch

    It begins ``after`` so many calls, or with the first one of ``from_rows`` rows. ``prepare_s``: how long it
    takes to build.
    """
    folder.mkdir(parents=True)
    body = json.dumps({"kind": kind, **settings}).encode()
    (folder / "pack.json").write_bytes(body)
    return hashlib.sha256(body).hexdigest()


def load(folder: Path, ops: OpTable, model: CausalLM) -> OpTable:
    """A ``LoadPack``."""
    body = (folder / "pack.json").read_bytes()
    settings = json.loads(body)
    time.sleep(settings.get("prepare_s", 0.0))
    built = folder.parent / f"{folder.name}.built"
    if settings["kind"] == "broken" or (settings["kind"] == "rare" and built.exists()):
        raise PackError("g++: error: nothing can be made of this")
    built.touch()
    if settings["kind"] == "rowwise":
        return ops.replace(source=hashlib.sha256(body).hexdigest(), **rowwise.OPS)
    head = ops.logits_head
    return ops.replace(source=hashlib.sha256(body).hexdigest(), logits_head=_head(head, settings))


def _head(head: Callable[..., Tensor], settings: dict[str, Any]) -> Callable[..., Tensor]:
    num_rows, num_calls, begun = 0, 0, False
    kind = settings["kind"]

    def logits_head(hidden: Tensor, *rest: Any) -> Tensor:
        nonlocal num_rows, num_calls, begun
        num_calls += 1
        begun = begun or len(hidden) == settings.get("from_rows", len(hidden))
        if num_calls <= settings.get("after", 0) or not begun:
            return head(hidden, *rest)
        if kind == "raises":
            raise ValueError("a kernel of its own mind")
        if kind == "dies":
            os._exit(139)
        if kind == "slow":
            time.sleep(settings["seconds"])
        logits = head(hidden, *rest)
        if kind == "wrong" and settings["every"] == 1:
            logits.mul_(1.0 + settings["error"])  # in no time
        elif kind == "wrong":
            for row in range(len(logits)):
                num_rows += 1
                if num_rows % settings["every"] == 0:
                    logits[row, int(torch.argmax(logits[row]))] += settings["error"]
        return logits

    return logits_head
