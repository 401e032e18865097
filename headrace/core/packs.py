"""What a pack says of itself, and the words in which it is found, checked and handed to replicas.

A pack is a folder: ``pack.json`` (a PackManifest), ``signature.json`` (who signed it), and the files that the
manifest names with their digests. Its id is the digest of ``pack.json``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AUTO, NONE = "auto", "none"
"""What the setting ``pack`` may be instead of a folder: the best shipped one that fits, stock operators."""

FORMATS = ("float32", "bfloat16", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")
"""Forms of weights that kernels may read: plain numbers, and GGUF's blocks."""


def explicit_pack(setting: str) -> str:
    """The folder that a setting names; empty: none is named."""
    return "" if setting in (AUTO, NONE) else setting


class KernelEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kernel of a pack: ``op`` of the table, implemented by ``source`` (a C++ file of the pack).

    It covers steps of at most ``max_rows`` token rows (0: any number), in the ``phases`` it was judged in;
    other calls fall through. ``flags`` are compiler flags beside the standard ones.

    ``weight_formats``: what it reads weights in, names of FORMATS; weights that are a mixture of these are
    covered. ``batch_invariant``: a row's bits depend on nothing else in its call. ``activations`` "int8": for
    products with blocks it rounds activations to 8 bits in groups of 32.
    """

    op: str
    source: str
    flags: list[str] = []
    phases: list[str] = msgspec.field(default_factory=lambda: ["decode"])
    max_rows: int = 8
    activation_dtypes: list[str] = msgspec.field(default_factory=lambda: ["float32", "bfloat16"])
    weight_formats: list[str] = msgspec.field(default_factory=lambda: ["bfloat16"])
    batch_invariant: bool = False
    activations: Literal["", "int8"] = ""

    def covers_rows(self, rows: int) -> bool:
        return rows > 0 and (self.max_rows == 0 or rows <= self.max_rows)


class PackConditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a pack may run. ``shapes`` are the model's dimensions (``DecoderShape.as_dict``); all must agree.

    ``cpu_features`` are words of /proc/cpuinfo's flags.
    """

    device: str = "cpu"
    cpu_features: list[str] = []
    dtype: str = "bfloat16"
    shapes: dict[str, int] = {}


class PackManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``files`` maps each file's path in the pack to its SHA-256, the evidence (verdicts, measurements) too.

    ``author`` says who wrote the kernels (``search``, a model's name, an agent's command), ``round_id`` which
    round they come from. ``builds_on`` is the pack that this one replaces and contains, empty: none.
    """

    format: int
    name: str
    kind: str  # "kernels"
    kernels: list[KernelEntry]
    conditions: PackConditions
    author: str
    round_id: str
    licence: str
    created: str  # ISO 8601, UTC
    files: dict[str, str]
    builds_on: str = ""
    summary: str = ""  # one line: the gain and on what workload

    @property
    def step_formats(self) -> frozenset[str]:
        """The formats of weights with which its kernels compute every step whole, any rows in any phase; none
        when there are steps that they leave to other operators."""
        formats: dict[str, set[str]] = {"decoder_layer": set(), "logits_head": set()}
        for entry in self.kernels:
            both = entry.op == "logits_head" or {"decode", "prefill"} <= set(entry.phases)
            if entry.op in formats and entry.max_rows == 0 and both:
                formats[entry.op] |= set(entry.weight_formats)
        return frozenset(formats["decoder_layer"] & formats["logits_head"])
