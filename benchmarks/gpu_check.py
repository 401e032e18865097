"""The check of the CUDA path, for whoever has a card: parity with the CPU, then speed. Under 8 minutes.

    scripts/gpu-check [--device cuda|cpu] [--json FILE]

    exact        fp32, eight families: greedy tokens on the device equal the CPU's, in ragged batches with
                 chunked prefill, and again when every prompt's prefix is found in the cache
    noise floor  bf16, two families: where streams first differ from the CPU's, the two best tokens were
                 closer than twice the largest change that chunking or the device makes on other texts
    speed        bf16, random weights in the shape of SmolLM2-135M

``--device cpu`` runs the same steps against itself: it shows that the script works, and nothing about CUDA.
Exit codes: 0 all equal, 1 something differs, 2 no CUDA device or a missing package.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.sides.headrace_engine import HeadraceSide
from headrace.bench.metrics import interquartile_range, median
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report, Row, Target, make_row, render, to_json
from headrace.bench.workload import token_prompts
from tests.engine.harness import Result, make_engine, make_request, run
from tests.models.tiny import make_tiny

EXACT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "mixtral")
BF16_FAMILIES = ("llama", "gemma3")
PROMPT_LENGTHS = (1, 3, 6, 13, 20, 31, 40)
NEW_TOKENS = 20
ALL_EQUAL = Target("value", ">=", 1.0)
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# (name, sequences, prompt tokens, new tokens after the first)
SPEEDS = (
    ("pp512", 1, 512, 0),
    ("pp2048", 1, 2048, 0),
    ("tg128", 1, 16, 128),
    ("tg64x8", 8, 16, 64),
    ("tg64x64", 64, 16, 64),
)
Device = Literal["cpu", "cuda"]


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 300) for _ in range(length)] for length in PROMPT_LENGTHS]


def streams(engine: Any, prompts: list[list[int]], **params: Any) -> list[Result]:
    """Each prompt's greedy result, all of them in one batch."""
    requests = [
        make_request(str(index), prompt, max_tokens=NEW_TOKENS, **params)
        for index, prompt in enumerate(prompts)
    ]
    results = run(engine, requests)
    return [results[str(index), 0] for index in range(len(prompts))]


def exact_row(family: str, folder: Path, device: Device) -> Row:
    """Share of streams whose tokens equal the CPU's: computed afresh, then over cached prefixes."""
    prompts = prompts_of(1)
    expected = [result.tokens for result in streams(make_engine(folder), prompts)]
    engine = make_engine(folder, device=device)
    fresh, again = streams(engine, prompts), streams(engine, prompts)
    equal = sum(
        result.tokens == tokens
        for results in (fresh, again)
        for result, tokens in zip(results, expected, strict=True)
    )
    hits = sum(result.num_cached_tokens > 0 for result in again)
    note = "" if hits else "no prompt was found in the prefix cache"
    return make_row(f"exact/{family}", equal / (2 * len(prompts)), "of streams", target=ALL_EQUAL, note=note)


def noise_floor_row(family: str, folder: Path, device: Device) -> Row:
    """Share of bf16 streams that equal the CPU's or first differ where two tokens were as good as equal."""
    floor = _noise_floor(folder, device)
    prompts = prompts_of(2)
    ours = streams(make_engine(folder, dtype="bfloat16", device=device), prompts, logprobs=2)
    cpu = streams(make_engine(folder, dtype="bfloat16"), prompts, logprobs=2)
    kept = equal = 0
    for mine, other in zip(ours, cpu, strict=True):
        pairs = zip(mine.tokens, other.tokens, strict=True)
        first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            equal += 1
            kept += 1
            continue
        (_, best), (_, second) = other.logprobs[first].top
        kept += best - second <= 2 * floor
    note = f"floor {floor:.3g}, {equal} of {len(prompts)} streams equal to the end"
    return make_row(f"bf16/{family}", kept / len(prompts), "of streams", target=ALL_EQUAL, note=note)


def _noise_floor(folder: Path, device: Device) -> float:
    """The largest change of a log-probability of a likely token that chunking or the device makes."""
    rng = random.Random(3)
    texts = [[rng.randrange(2, 300) for _ in range(40)] for _ in range(8)]

    def known(place: Device, chunk: int) -> Iterator[dict[int, float]]:
        engine = make_engine(folder, dtype="bfloat16", device=place, max_num_batched_tokens=chunk)
        requests = [
            make_request(str(index), text, max_tokens=1, prompt_logprobs=20)
            for index, text in enumerate(texts)
        ]
        results = run(engine, requests)
        for index in range(len(texts)):
            for entry in (results[str(index), 0].prompt_logprobs or [])[1:]:
                assert entry is not None
                yield {entry.token_id: entry.logprob, **dict(entry.top)}

    whole = list(known(device, 64))
    changes = [
        abs(left[token] - right[token])
        for other in (known(device, 3), known("cpu", 64))
        for left, right in zip(whole, other, strict=True)
        for token in left.keys() & right.keys()
    ]
    return max(changes)


def speed_rows(folder: Path, device: Device, repeats: int) -> Iterator[Row]:
    """Tokens per second, medians; prompts are never used twice."""
    side = HeadraceSide(str(folder), torch.get_num_threads(), 4096, device=device)
    rng = random.Random(4)

    def once(sequences: int, length: int, new_tokens: int) -> float:
        prompts = token_prompts(rng, sequences, length, SMOLLM2["vocab_size"])
        timeline = side.run(prompts, new_tokens + 1)
        if new_tokens == 0:
            return sequences * length / timeline.prefill()["seconds"]
        decode = timeline.decode()
        return decode["tokens"] / decode["seconds"]

    for name, *sizes in SPEEDS:
        once(*sizes)
        rates = [once(*sizes) for _ in range(repeats)]
        yield make_row(f"speed/{name}", median(rates), "tok/s", spread=interquartile_range(rates))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    if peak is not None:
        yield make_row("speed/peak_memory", peak, "GiB")


def check(device: Device, repeats: int, command: str) -> Report:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    recipe = base_recipe(command, threads=torch.get_num_threads(), packages=("torch", "transformers"))
    recipe["checked"] = (
        f"cuda, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        if device == "cuda"
        else "the CPU against itself (says nothing about CUDA)"
    )
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for family in EXACT_FAMILIES:
            rows.append(exact_row(family, make_tiny(family, scratch / family), device))
            _say(began, rows[-1])
        for family in BF16_FAMILIES:
            rows.append(noise_floor_row(family, scratch / family, device))
            _say(began, rows[-1])
        folder = make_tiny("llama", scratch / "smollm2", dtype=torch.bfloat16, **SMOLLM2)
        for row in speed_rows(folder, device, repeats):
            rows.append(row)
            _say(began, row)
    recipe["took"] = f"{time.monotonic() - began:.0f} s"
    return Report(name="gpu-check", recipe=recipe, rows=rows)


def _say(began: float, row: Row) -> None:
    value = "-" if row.value is None else f"{row.value:,.3g}"
    print(f"{time.monotonic() - began:6.1f} s  {row.id}: {value} {row.unit}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no CUDA device\n"
            "hint: run it on a machine with an NVIDIA card and a CUDA build of torch; --device cpu only "
            "shows that the script itself works",
            file=sys.stderr,
        )
        return 2
    report = check(arguments.device, arguments.repeats, " ".join(["scripts/gpu-check", *argv]))
    print(render(report))
    if arguments.json is not None:
        arguments.json.write_bytes(to_json(report))
    return 0 if all(row.met is not False for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
