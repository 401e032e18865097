"""Our engine behind the side protocol: the public Engine, stepped in this process.

python -m benchmarks.sides.headrace_engine MODEL THREADS MAX_MODEL_LEN none|int8|auto
"""

from __future__ import annotations

import itertools
import os
from typing import Any, Literal

import torch

from benchmarks.sides import protocol
from headrace.core.knobs import EngineConfig
from headrace.core.packs import AUTO
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.engine import Engine
from headrace.engine.model_runner import KVGeometry
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.models.resolve import resolve_model


class HeadraceSide:
    """Every default of the engine but the sizes that all sides share."""

    def __init__(
        self,
        model: str,
        threads: int,
        max_model_len: int,
        quantization: Literal["auto", "none", "int8"] = "none",
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        resolved = resolve_model(model, dtype="bfloat16", quantization=quantization)
        self._engine = Engine(
            EngineConfig(
                dtype="bfloat16",
                device=device,
                threads=threads,
                max_model_len=max_model_len,
                kv_cache_gib=1.0,
                quantization=quantization,
                pack=os.environ.get("HEADRACE_PACK", AUTO),
            ),
            resolved.folder,
            revision=resolved.revision,
        )
        fields = self._engine.hello_fields
        self.weights_seconds: float | None = fields["load_seconds"]
        self.notes = self._engine.kernels
        self.device: str = fields["device"]
        self._ids = itertools.count()

    def run(self, prompts: list[list[int]], new_tokens: int) -> protocol.Timeline:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=0)
        timeline = protocol.Timeline(len(prompts))
        counts: dict[str, int] = {}
        for prompt in prompts:
            request_id = str(next(self._ids))
            self._engine.add(Request(request_id=request_id, prompt=pack_tokens(prompt), sampling=sampling))
        while self._engine.has_work:
            result = self._engine.step()
            if result.failed:
                raise RuntimeError(result.failed[0].message)
            for output in result.outputs:
                counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
                timeline.record(output.request_id, counts[output.request_id])
            timeline.stamp()
            self._engine.take_events()
        return timeline

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """In one chunk, on a cache of its own."""
        model = self._engine.runner.model
        block_size = 16
        count = -(-len(tokens) // block_size)
        geometry = KVGeometry(list(model.config.kv_specs), block_size, torch.bfloat16)
        device = torch.device("cpu")
        batch = AttentionBatch.build([BatchEntry(0, len(tokens), list(range(count)))], block_size, device)
        hidden = model.forward(torch.tensor(tokens), batch, geometry.allocate(count, device))
        return model.logits(hidden)


def _side(arguments: list[str]) -> HeadraceSide:
    model, threads, max_model_len, quantization = arguments
    form: Any = quantization
    return HeadraceSide(model, int(threads), int(max_model_len), form)


if __name__ == "__main__":
    protocol.serve(_side)
