"""Who is measured: each side with one way to start, ask, pause and end it.

headrace            our Engine on bf16             its server: headrace serve
headrace-int8       --quantization int8            "
headrace-file       the blocks of the file         "
transformers        eager, bf16, hand-written loop no server
vllm-eager          vLLM-CPU, enforce_eager        its server: OpenAI api_server, the same
vllm-compiled       vLLM-CPU as it comes           "
llama-bf16          llama.cpp, BF16 GGUF           its server: llama-server
llama-q8            llama.cpp, Q8_0 GGUF           "
llama-file          llama.cpp, the file as shipped "
onnxruntime-int4    onnxruntime-genai, int4        no server
openvino-q8         openvino-genai, Q8_0 GGUF      no server
openvino-file       openvino-genai, the file       no server
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.child import Child, ChildError, Server, free_port, niced
from benchmarks.forms import QUANTIZATION
from benchmarks.gguf_copy import gguf_copy, matrix_bytes
from benchmarks.int4 import int4_model
from headrace.bench.workload import token_prompts
from headrace.core.engine_environment import engine_environment

MAX_MODEL_LEN = 4096
DECODE_PROMPT = 16
START_TIMEOUT_S = 600.0
SERVED_NAME = "bench"


class NotInstalled(Exception):
    """The side's peer is not on this machine."""


@dataclass(frozen=True)
class Scenario:
    """``num_tokens``: prompt tokens for a prefill, new tokens of each sequence for a decode."""

    name: str
    kind: str
    num_tokens: int
    num_sequences: int = 1


PP512 = Scenario("pp512", "prefill", 512)
PP2048 = Scenario("pp2048", "prefill", 2048)
TG128 = Scenario("tg128", "decode", 128)
TG64X8 = Scenario("tg64x8", "decode", 64, 8)
SCENARIOS = (PP512, PP2048, TG128, TG64X8)


@dataclass(frozen=True)
class Model:
    """One model in the forms that the sides read."""

    name: str
    folder: Path
    gguf: Path
    vocab_size: int
    weights_bytes: int

    @classmethod
    def resolve(cls, name: str) -> Model:
        from headrace.models.cache import no_progress
        from headrace.models.packages import SHORT_NAMES, package_file
        from headrace.models.resolve import resolve_model

        folder = resolve_model(name).folder
        config = json.loads((folder / "config.json").read_text())
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return cls(name, folder, package_file(SHORT_NAMES[name], no_progress), config["vocab_size"], weights)

    @property
    def num_weights(self) -> int:
        return self.weights_bytes // 2

    def bits_of(self, side: str) -> float:
        """Stored bits a weight, the head and the embedding included."""
        if side.startswith("onnxruntime"):
            return (
                8
                * _size(peers.peers_root() / "models" / f"{self.name}-int4" / "model.onnx.data")
                / self.num_weights
            )
        if side.startswith("openvino"):
            saved = peers.peers_root() / "models" / f"{self.name}-{side}" / "openvino_model.bin"
            return 8 * _size(saved) / self.num_weights
        if side.endswith("-file"):
            return 8 * matrix_bytes(self.gguf) / self.num_weights
        return 8.5 if side.endswith(("-q8", "-int8")) else 16.0

    def gguf_of(self, side: str) -> Path:
        """The file that a side which reads GGUF gets."""
        if side.endswith("-file"):
            return self.gguf
        kind = "BF16" if side.endswith("-bf16") else "Q8_0"
        name = f"{self.name}-{kind.lower().replace('_', '')}.gguf"
        return gguf_copy(self.gguf, peers.cache_root() / "bench" / name, kind)


def _size(path: Path) -> int:
    return path.stat().st_size


class Contender:
    """One side with one model, loaded and paused between its turns."""

    spawn_seconds: float | None = None
    weights_seconds: float | None = None
    notes = ""

    def measure(self, scenario: Scenario, rng: random.Random) -> float:
        """Tokens per second of one repetition, on prompts that were never used before."""
        raise AssertionError("every contender measures")

    def logits(self, tokens: list[int]) -> np.ndarray | None:
        """(tokens, vocab) logits or log-probabilities of what follows each token; None: it cannot tell."""
        return None

    def peak_memory(self) -> int:
        """Bytes, so far."""
        raise AssertionError("every contender has memory")

    def close(self) -> None:
        """Ends what runs."""


class ChildContender(Contender):
    """A side behind ``sides.protocol``."""

    def __init__(self, side: str, model: Model, *, threads: int, nice: int) -> None:
        self._vocab_size = model.vocab_size
        log = peers.cache_root() / "bench" / "logs" / f"{model.name}-{side}.log"
        command = _child_command(side, model, threads)
        # Our engine's process is started as headrace serve starts it.
        variables = engine_environment() if side in QUANTIZATION else {}
        self._child = Child(
            command,
            environment={**variables, **environment(threads)},
            log=log,
            timeout=START_TIMEOUT_S,
            nice=nice,
        )
        self.spawn_seconds = self._child.spawn_seconds
        self.weights_seconds = self._child.ready["weights_seconds"]
        self.notes = self._child.ready["notes"]
        self._child.pause()

    def measure(self, scenario: Scenario, rng: random.Random) -> float:
        self._child.resume()
        try:
            # The side was stopped: a few tokens bring its code and weights back near the processor.
            self._ask("decode", 1, DECODE_PROMPT, 4, rng)
            if scenario.kind == "prefill":
                answer = self._ask("prefill", scenario.num_sequences, scenario.num_tokens, 1, rng)
                return scenario.num_sequences * scenario.num_tokens / float(answer["seconds"])
            answer = self._ask("decode", scenario.num_sequences, DECODE_PROMPT, scenario.num_tokens, rng)
            return float(answer["tokens"] / answer["seconds"])
        finally:
            self._child.pause()

    def logits(self, tokens: list[int]) -> np.ndarray | None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "logits.npy"
            self._child.resume()
            try:
                self._child.ask({"op": "logits", "tokens": tokens, "file": str(file)}, timeout=300.0)
            finally:
                self._child.pause()
            table: np.ndarray = np.load(file)
            return table

    def peak_memory(self) -> int:
        return self._child.peak_memory()

    def close(self) -> None:
        self._child.close()

    def _ask(
        self, kind: str, num_sequences: int, prompt_length: int, new_tokens: int, rng: random.Random
    ) -> dict[str, Any]:
        prompts = token_prompts(rng, num_sequences, prompt_length, self._vocab_size)
        return self._child.ask({"op": kind, "prompts": prompts, "tokens": new_tokens})


class LlamaContender(Contender):
    """llama.cpp's own benchmarks, one process a repetition (it loads in a blink, and warms up itself)."""

    def __init__(self, side: str, model: Model, *, threads: int, nice: int) -> None:
        self._side = side
        self._model = model
        self._gguf = model.gguf_of(side)
        self._threads = threads
        self._nice = nice
        self._peak = 0
        self._bench = _llama("llama-bench")
        self._batched = _llama("llama-batched-bench")

    def measure(self, scenario: Scenario, rng: random.Random) -> float:
        if scenario.num_sequences > 1:
            sizes = ["-npp", str(DECODE_PROMPT), "-ntg", str(scenario.num_tokens)]
            command = [str(self._batched), "-c", "4096", *sizes, "-npl", str(scenario.num_sequences)]
            line = self._run([*command, "--output-format", "jsonl"])
            records = [json.loads(text) for text in line.splitlines() if text.startswith("{")]
            return float(records[-1]["speed_tg"])
        counts = ("-p", "-n") if scenario.kind == "prefill" else ("-n", "-p")
        sizes = [counts[0], str(scenario.num_tokens), counts[1], "0"]
        records = json.loads(self._run([str(self._bench), *sizes, "-r", "1", "-o", "json"]))
        return float(records[-1]["avg_ts"])

    def logits(self, tokens: list[int]) -> np.ndarray | None:
        """From its server, which lists every token's log-probability when asked for that many."""
        server = start_server(self._side, self._model, threads=self._threads, nice=self._nice)
        try:
            rows = [self._row(server.url, tokens[:end]) for end in range(1, len(tokens) + 1)]
        finally:
            server.close()
        return np.stack(rows)

    def _row(self, url: str, tokens: list[int]) -> np.ndarray:
        size = self._model.vocab_size
        body = {"prompt": tokens, "n_predict": 1, "n_probs": size, "temperature": 0.0, "cache_prompt": True}
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            listed = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
        row = np.full(size, -np.inf, dtype=np.float32)
        for entry in listed:
            if entry["id"] < size:
                row[entry["id"]] = entry["logprob"]
        return row

    def peak_memory(self) -> int:
        return self._peak

    def _run(self, command: list[str]) -> str:
        command = [*command, "-m", str(self._gguf), "-t", str(self._threads)]
        script = (
            "import json, resource, subprocess, sys\n"
            "r = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
            "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
            "print(json.dumps([r.returncode, peak, r.stdout, r.stderr[-500:]]))"
        )
        result = subprocess.run(
            niced([sys.executable, "-c", script, *command], self._nice),
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
            start_new_session=True,
        )
        code, peak, stdout, stderr = json.loads(result.stdout)
        if code != 0:
            raise ChildError(f"{command[0]} exited with {code}: {stderr}")
        self._peak = max(self._peak, peak * 1024)
        return str(stdout)


def start(side: str, model: Model, *, threads: int, nice: int) -> Contender:
    """Loads a side; raises NotInstalled or ChildError."""
    kind = LlamaContender if side.startswith("llama") else ChildContender
    return kind(side, model, threads=threads, nice=nice)


def start_server(side: str, model: Model, *, threads: int, nice: int) -> Server:
    """The side's own HTTP server on a free port; raises NotInstalled or ChildError."""
    port = free_port()
    log = peers.cache_root() / "bench" / "logs" / f"{model.name}-{side}-server.log"
    common = ["--host", "127.0.0.1", "--port", str(port)]
    if side in QUANTIZATION:
        sizes = ["--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-gib", "1", "--threads", str(threads)]
        command = [sys.executable, "-m", "headrace.cli.main", "serve", model.name, "--dtype", "bfloat16"]
        command += ["--quantization", QUANTIZATION[side]]
        command += [*sizes, "--served-model-name", SERVED_NAME, *common]
    elif side.startswith("vllm"):
        command = [
            _python("vllm-cpu"),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model.folder),
        ]
        command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
        command += ["--served-model-name", SERVED_NAME, *common]
        command += ["--enforce-eager"] if side == "vllm-eager" else []
    elif side.startswith("llama"):
        command = [str(_llama("llama-server")), "-m", str(model.gguf_of(side)), "-t", str(threads)]
        command += ["-c", "8192", "-np", "8", "--alias", SERVED_NAME, *common]
    else:
        raise NotInstalled(f"{side} has no server of its own")
    return Server(
        command,
        port=port,
        nice=nice,
        environment=environment(threads, in_process=False),
        log=log,
        timeout=START_TIMEOUT_S,
        ready_path="/ready" if side in QUANTIZATION else "/health",
    )


def environment(threads: int, *, in_process: bool = True) -> dict[str, str]:
    """What every side is started with: the same threads, no network, passive waits between steps."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(peers.peers_root() / "vllm-cache"),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if in_process:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**os.environ, **variables}


def _child_command(side: str, model: Model, threads: int) -> list[str]:
    folder = str(model.folder)
    if side in QUANTIZATION:
        module = "benchmarks.sides.headrace_engine"
        return [
            sys.executable,
            "-m",
            module,
            model.name,
            str(threads),
            str(MAX_MODEL_LEN),
            QUANTIZATION[side],
        ]
    if side == "transformers":
        return [sys.executable, "-m", "benchmarks.sides.transformers_eager", folder]
    if side.startswith("onnxruntime"):
        python = _python("onnxruntime-genai")
        return [python, "-m", "benchmarks.sides.ort_genai", str(int4_model(model, python, threads))]
    if side.startswith("openvino"):
        gguf, own = model.gguf_of(side), peers.peers_root() / "models" / f"{model.name}-{side}"
        module = "benchmarks.sides.openvino_genai"
        return [_python("openvino-genai"), "-m", module, str(gguf), str(threads), str(own)]
    mode = side.removeprefix("vllm-")
    return [_python("vllm-cpu"), "-m", "benchmarks.sides.vllm_cpu", folder, mode, str(MAX_MODEL_LEN)]


def _python(peer: str) -> str:
    python = peers.python_of(peer)
    if python is None:
        raise NotInstalled(f"not installed; scripts/bench install-peers {peer}")
    return str(python)


def _llama(name: str) -> Path:
    binary = peers.llama_binary(name)
    if binary is None:
        raise NotInstalled("not installed; scripts/bench install-peers llama.cpp")
    return binary
