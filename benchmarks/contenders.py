"""Who is measured: each side with one way to start, ask, pause and end it.

headrace        our Engine                     its server: headrace serve
transformers    eager, bf16, hand-written loop no server
vllm-eager      vLLM-CPU, enforce_eager        its server: OpenAI api_server, the same
vllm-compiled   vLLM-CPU as it comes           "
llama-bf16      llama.cpp, BF16 GGUF           its server: llama-server
llama-file      llama.cpp, the file as shipped "
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.bf16_gguf import bf16_copy
from benchmarks.child import Child, ChildError, Server, free_port, niced
from headrace.bench.workload import token_prompts
from headrace.fleet.local import engine_environment

SIDES = ("headrace", "transformers", "vllm-eager", "vllm-compiled", "llama-bf16", "llama-file")
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
    def bf16_gguf(self) -> Path:
        return bf16_copy(self.gguf, peers.cache_root() / "bench" / f"{self.name}-bf16.gguf")


class Contender:
    """One side with one model, loaded and paused between its turns."""

    spawn_seconds: float | None = None
    weights_seconds: float | None = None
    notes = ""

    def measure(self, scenario: Scenario, rng: random.Random) -> float:
        """Tokens per second of one repetition, on prompts that were never used before."""
        raise AssertionError("every contender measures")

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
        variables = engine_environment() if side == "headrace" else {}
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
        self._gguf = model.bf16_gguf if side == "llama-bf16" else model.gguf
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
    if side == "headrace":
        sizes = ["--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-gib", "1", "--threads", str(threads)]
        command = [sys.executable, "-m", "headrace.cli.main", "serve", model.name, "--dtype", "bfloat16"]
        command += [*sizes, "--served-model-name", SERVED_NAME, *common]
    elif side.startswith("vllm"):
        command = [str(_vllm()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)]
        command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
        command += ["--served-model-name", SERVED_NAME, *common]
        command += ["--enforce-eager"] if side == "vllm-eager" else []
    elif side.startswith("llama"):
        gguf = model.bf16_gguf if side == "llama-bf16" else model.gguf
        command = [str(_llama("llama-server")), "-m", str(gguf), "-t", str(threads)]
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
        ready_path="/ready" if side == "headrace" else "/health",
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
    if side == "headrace":
        module = "benchmarks.sides.headrace_engine"
        return [sys.executable, "-m", module, folder, str(threads), str(MAX_MODEL_LEN)]
    if side == "transformers":
        return [sys.executable, "-m", "benchmarks.sides.transformers_eager", folder]
    mode = side.removeprefix("vllm-")
    return [str(_vllm()), "-m", "benchmarks.sides.vllm_cpu", folder, mode, str(MAX_MODEL_LEN)]


def _vllm() -> Path:
    python = peers.vllm_python()
    if python is None:
        raise NotInstalled("not installed; scripts/bench install-peers vllm-cpu")
    return python


def _llama(name: str) -> Path:
    binary = peers.llama_binary(name)
    if binary is None:
        raise NotInstalled("not installed; scripts/bench install-peers llama.cpp")
    return binary
