"""Transformers in eager mode behind the side protocol.

    python -m benchmarks.sides.transformers_eager FOLDER

The loop is written by hand (forward, arg-max, append), which is faster than ``generate()``: the stricter
baseline. A batch has prompts of one length.
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.sides import protocol


class TransformersSide:
    """The model as ``from_pretrained`` gives it in bf16, its default attention (SDPA) and dynamic cache."""

    def __init__(self, folder: str) -> None:
        began = time.perf_counter()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model.eval()
        self.weights_seconds: float | None = time.perf_counter() - began
        self.notes = f"attention {self._model.config._attn_implementation}"

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> protocol.Timeline:
        timeline = protocol.Timeline(len(prompts))
        tokens = torch.tensor(prompts)  # (sequences, prompt length)
        cache = DynamicCache(config=self._model.config)
        for count in range(1, new_tokens + 1):
            logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens.tolist()
            for index in range(len(prompts)):
                timeline.record(str(index), count)
            timeline.stamp()
        return timeline

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return logits


if __name__ == "__main__":
    protocol.serve(lambda arguments: TransformersSide(arguments[0]))
