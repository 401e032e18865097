"""openvino-genai on a GGUF file behind the side protocol; runs with its own interpreter.

    python -m benchmarks.sides.openvino_genai FILE THREADS FOLDER

One prompt goes through its LLMPipeline, several through its ContinuousBatchingPipeline, which reads what the
first saved in FOLDER. Prefix caching is off: no prompt comes twice.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import protocol


class OpenvinoSide:
    """``weights_seconds``: from the GGUF file to a pipeline."""

    def __init__(self, file: str, threads: int, folder: str) -> None:
        import openvino_genai  # type: ignore[import-not-found]  # lives in its own venv

        self._ov = openvino_genai
        link = Path(folder) / "model.gguf"  # it saves its own form beside the file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(file)
        self._folder = link.parent
        self._properties = {"INFERENCE_NUM_THREADS": threads}
        began = time.perf_counter()
        self._one: Any = openvino_genai.LLMPipeline(
            str(link),
            "CPU",
            scheduler_config=self._scheduler(),
            enable_save_ov_model=True,
            **self._properties,
        )
        self.weights_seconds: float | None = time.perf_counter() - began
        size = os.path.getsize(link.parent / "openvino_model.bin")
        self.notes = f"openvino-genai {openvino_genai.__version__}, {size} bytes of weights"
        self._many: Any = None

    def run(self, prompts: list[list[int]], new_tokens: int) -> protocol.Timeline:
        config = self._ov.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        if len(prompts) == 1:
            return self._run_one(prompts[0], config)
        if self._many is None:
            self._many = self._ov.ContinuousBatchingPipeline(
                str(self._folder), self._scheduler(), "CPU", self._properties, {}
            )
        timeline = protocol.Timeline(len(prompts))
        handles = [
            self._many.add_request(index, self._tensor([prompt]), config)
            for index, prompt in enumerate(prompts)
        ]
        counts = [0] * len(prompts)
        while self._many.has_non_finished_requests():
            self._many.step()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        counts[index] += len(output.generated_ids)
                    timeline.record(str(index), counts[index])
            timeline.stamp()
        return timeline

    def _run_one(self, prompt: list[int], config: Any) -> protocol.Timeline:
        timeline = protocol.Timeline(1)
        running = self._ov.StreamingStatus.RUNNING

        class Streamer(self._ov.StreamerBase):  # type: ignore[misc,name-defined]
            count = 0

            def write(self, token: Any) -> Any:
                self.count += len(token) if isinstance(token, list) else 1
                timeline.record("0", self.count)
                timeline.stamp()
                return running

            def end(self) -> None:
                pass

        self._one.generate(self._tensor([prompt]), config, Streamer())
        return timeline

    def logits(self, tokens: list[int]) -> Any:
        import openvino  # type: ignore[import-not-found]

        core = openvino.Core()
        model = core.compile_model(str(self._folder / "openvino_model.xml"), "CPU", self._properties)
        ids = protocol.matrix([tokens], "int64")
        inputs = {
            "input_ids": ids,
            "attention_mask": protocol.matrix([[1] * len(tokens)], "int64"),
            "position_ids": protocol.matrix([list(range(len(tokens)))], "int64"),
            "beam_idx": protocol.matrix([[0]], "int32")[0],
        }
        return next(iter(model.create_infer_request().infer(inputs).values()))[0]

    def _tensor(self, rows: list[list[int]]) -> Any:
        import openvino

        return openvino.Tensor(protocol.matrix(rows, "int64"))

    def _scheduler(self) -> Any:
        config = self._ov.SchedulerConfig()
        config.enable_prefix_caching = False
        config.cache_size = 1
        return config


if __name__ == "__main__":
    protocol.serve(lambda arguments: OpenvinoSide(arguments[0], int(arguments[1]), arguments[2]))
