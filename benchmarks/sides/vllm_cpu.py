"""vLLM on CPU behind the side protocol; runs with vLLM's own interpreter.

python -m benchmarks.sides.vllm_cpu FOLDER eager|compiled MAX_MODEL_LEN
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from benchmarks.sides import protocol


class VllmSide:
    """vLLM's engine, stepped in this process, with its own defaults (its prefix cache finds nothing)."""

    def __init__(self, folder: str, mode: str, max_model_len: int) -> None:
        from vllm import (  # type: ignore[import-not-found]  # lives in its own venv
            EngineArgs,
            LLMEngine,
            SamplingParams,
            TokensPrompt,
        )

        self._params = SamplingParams
        self._prompt = TokensPrompt
        began = time.perf_counter()
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                dtype="bfloat16",
                max_model_len=max_model_len,
                enforce_eager=mode == "eager",
                skip_tokenizer_init=True,
                disable_log_stats=True,
                max_logprobs=-1,
            )
        )
        self.weights_seconds: float | None = None
        self.notes = f"engine ready {time.perf_counter() - began:.1f} s after its imports"
        self._ids = itertools.count()

    def run(self, prompts: list[list[int]], new_tokens: int) -> protocol.Timeline:
        params = self._params(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        timeline = protocol.Timeline(len(prompts))
        for prompt in prompts:
            self._engine.add_request(str(next(self._ids)), self._prompt(prompt_token_ids=prompt), params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                timeline.record(output.request_id, len(output.outputs[0].token_ids))
            timeline.stamp()
        return timeline

    def logits(self, tokens: list[int]) -> Any:
        """Log-probabilities of the whole vocabulary, one row less: what follows the last is not asked for."""
        import numpy

        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
        self._engine.add_request(str(next(self._ids)), self._prompt(prompt_token_ids=tokens), params)
        rows: list[Any] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                rows = output.prompt_logprobs or rows
        width = max(map(len, rows[1:]))
        table = numpy.full((len(rows) - 1, width), -numpy.inf, dtype=numpy.float32)
        for place, row in enumerate(rows[1:]):
            table[place, list(row)] = [entry.logprob for entry in row.values()]
        return table


if __name__ == "__main__":
    protocol.serve(lambda arguments: VllmSide(arguments[0], arguments[1], int(arguments[2])))
