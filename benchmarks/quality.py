"""How far a side's distributions are from those of the file's own weights in float32."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from benchmarks.contenders import Model

# Written for this purpose; about ninety tokens of plain English and a little code.
TEXT = """The mill stands where the valley narrows. In spring the stream carries more water than the wheel can
use, and most of it runs over the weir; in late summer a boy with a bucket could stop it. So the miller built
a pond above the house, and a channel of oak boards from the pond to the wheel. Every evening he wrote down
how high the water stood, how many sacks he had ground, and what had broken.

def flow(level: float, width: float) -> float:
    return 1.7 * width * level ** 1.5
"""
_LOGITS_BYTES = 64 << 20


@lru_cache(maxsize=1)
def reference_logits(model: Model) -> tuple[list[int], np.ndarray]:
    """(tokens, (tokens, vocab) float32): Transformers in float32 on the dequantized weights."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from headrace.models.resolve import resolve_model

    folder = resolve_model(model.name, dtype="float32").folder
    count = max(24, min(96, _LOGITS_BYTES // (4 * model.vocab_size)))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids[:count]
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = network(torch.tensor([tokens]), use_cache=False).logits[0]
    return tokens, logits.numpy()


def kl_divergence(reference: np.ndarray, table: np.ndarray) -> float:
    """Mean over the positions that both have of KL(reference || table), in nats; logits are normalised."""
    rows, width = min(len(reference), len(table)), min(reference.shape[1], table.shape[1])
    wide, other = _log_softmax(reference[:rows, :width]), _log_softmax(table[:rows, :width])
    return float((np.exp(wide) * (wide - other)).sum(axis=1).mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    normalised: np.ndarray = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return normalised
