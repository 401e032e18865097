"""Our engine behind the side protocol: the public Engine, stepped in this process.

python -m benchmarks.sides.headrace_engine FOLDER THREADS MAX_MODEL_LEN
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

from benchmarks.sides import protocol
from headrace.core.knobs import EngineConfig
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.engine import Engine


class HeadraceSide:
    """Every default of the engine but the sizes that all sides share."""

    def __init__(
        self, folder: str, threads: int, max_model_len: int, device: Literal["cpu", "cuda"] = "cpu"
    ) -> None:
        self._engine = Engine(
            EngineConfig(
                dtype="bfloat16",
                device=device,
                threads=threads,
                max_model_len=max_model_len,
                kv_cache_gib=1.0,
            ),
            Path(folder),
        )
        fields = self._engine.hello_fields
        self.weights_seconds: float | None = fields["load_seconds"]
        self.notes = "; ".join(fields["notes"])
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


if __name__ == "__main__":
    protocol.serve(lambda arguments: HeadraceSide(arguments[0], int(arguments[1]), int(arguments[2])))
