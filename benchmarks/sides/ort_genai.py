"""onnxruntime-genai behind the side protocol; runs with its own interpreter.

python -m benchmarks.sides.ort_genai FOLDER
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.sides import protocol


class OrtSide:
    """Its generator, token by token; a batch has prompts of one length."""

    def __init__(self, folder: str) -> None:
        import onnxruntime_genai  # type: ignore[import-not-found]  # lives in its own venv

        self._og = onnxruntime_genai
        began = time.perf_counter()
        self._model: Any = onnxruntime_genai.Model(folder)
        self.weights_seconds: float | None = time.perf_counter() - began
        self.notes = f"onnxruntime-genai {onnxruntime_genai.__version__}"

    def run(self, prompts: list[list[int]], new_tokens: int) -> protocol.Timeline:
        generator = self._generator(len(prompts), len(prompts[0]) + new_tokens)
        timeline = protocol.Timeline(len(prompts))
        generator.append_tokens(protocol.matrix(prompts, "int32"))
        for count in range(1, new_tokens + 1):
            generator.generate_next_token()
            for index in range(len(prompts)):
                timeline.record(str(index), count)
            timeline.stamp()
        return timeline

    def logits(self, tokens: list[int]) -> Any:
        generator = self._generator(1, len(tokens) + 1)
        generator.append_tokens(protocol.matrix([tokens], "int32"))
        return generator.get_output("logits")[0]

    def _generator(self, batch: int, length: int) -> Any:
        parameters = self._og.GeneratorParams(self._model)
        parameters.set_search_options(max_length=length, min_length=length, batch_size=batch, do_sample=False)
        return self._og.Generator(self._model, parameters)


if __name__ == "__main__":
    protocol.serve(lambda arguments: OrtSide(arguments[0]))
