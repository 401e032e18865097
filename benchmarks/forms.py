"""In which form weights are held: sides are compared within one form, at about the same bits a weight.

    bf16    2 bytes each
    8-bit   blocks of 32 with a scale (Q8_0), the head too
    file    the blocks of the shipped file, 4 to 5 bits and a wider head

``stream``: the share of the rate of reads at the weights' own size that decode has to reach.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """``ours`` and ``peers`` are names of sides (contenders.py)."""

    name: str
    ours: str
    peers: tuple[str, ...]
    stream: float

    @property
    def sides(self) -> tuple[str, ...]:
        return (self.ours, *self.peers)


FORMS = (
    Form("bf16", "headrace", ("transformers", "vllm-eager", "vllm-compiled", "llama-bf16"), 0.80),
    Form("8-bit", "headrace-int8", ("llama-q8", "openvino-q8"), 0.70),
    Form("file", "headrace-file", ("llama-file", "onnxruntime-int4", "openvino-file"), 0.55),
)
SIDES = tuple(side for form in FORMS for side in form.sides)
QUANTIZATION = {"headrace": "none", "headrace-int8": "int8", "headrace-file": "auto"}
"""What our sides are told with --quantization."""
SERVERS = ("headrace", "vllm", "llama")
"""How the names of sides begin that have an HTTP server."""


def has_server(side: str) -> bool:
    return side.startswith(SERVERS)
