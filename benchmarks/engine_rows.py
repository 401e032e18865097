"""What `bench engine` measured, turned into rows with the bounds that they are held to."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.contenders import SCENARIOS, Model
from headrace.bench.metrics import interquartile_range, median
from headrace.bench.report import Row, Target, make_row

TARGETS = {
    ("tg128", "vllm-eager"): Target("ratio", ">=", 1.3),
    ("tg64x8", "vllm-eager"): Target("ratio", ">=", 1.0),
    ("pp512", "vllm-eager"): Target("ratio", ">=", 0.9),
    ("pp2048", "vllm-eager"): Target("ratio", ">=", 0.9),
    ("tg128", "transformers"): Target("ratio", ">=", 2.5),
}
LOAD_TARGET = Target("value", "<", 3.0)
_UNITS = {
    **{scenario.name: "tok/s" for scenario in SCENARIOS},
    "http.output": "tok/s",
    "http.ttft": "ms",
    "http.tpot": "ms",
    "http.ready": "s",
    "http.memory": "GiB",
    "load.ready": "s",
    "memory": "GiB",
}


class Measurements:
    """Values by side and metric, and why a side has none."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.why: dict[str, str] = {}

    def add(self, side: str, metric: str, value: float) -> None:
        self._values[side, metric].append(value)

    def of(self, side: str, metric: str) -> tuple[float | None, float | None]:
        """Median and interquartile range; (None, None) where nothing was measured."""
        values = self._values.get((side, metric))
        if not values:
            return None, None
        return median(values), interquartile_range(values) if len(values) > 1 else None

    @contextmanager
    def failures(self, side: str, *kinds: type[Exception]) -> Iterator[None]:
        """Keeps the reason instead of ending the run."""
        try:
            yield
        except kinds as error:
            self.why[side] = str(error)


def rows_of(
    model: Model, sides: list[str], measured: Measurements, roofs: dict[str, Any], *, http: bool
) -> list[Row]:
    """Headrace's figure beside each peer's, then beside the machine's roof."""
    rows = []
    peers = [side for side in sides if side != "headrace"]
    for metric, unit in _UNITS.items():
        value, spread = measured.of("headrace", metric)
        served = metric.startswith("http.")
        for peer in peers:
            if (served and peer == "transformers") or (metric == "load.ready" and peer.startswith("llama")):
                continue
            if served and not http:
                continue
            peer_value, peer_spread = measured.of(peer, metric)
            reasons = [measured.why.get(f"{side} server" if served else side) for side in ("headrace", peer)]
            rows.append(
                make_row(
                    f"{model.name}/{metric}/{peer}",
                    value,
                    unit,
                    spread=spread,
                    peer=peer,
                    peer_value=peer_value,
                    peer_spread=peer_spread,
                    target=TARGETS.get((metric, peer)),
                    note="; ".join(reason for reason in reasons if reason),
                )
            )
        if metric in {scenario.name for scenario in SCENARIOS}:
            roof, name = _roof(model, metric, roofs)
            rows.append(
                make_row(
                    f"{model.name}/{metric}/roof",
                    value,
                    unit,
                    spread=spread,
                    peer=name,
                    peer_value=roof,
                )
            )
    value, spread = measured.of("headrace", "load.engine")
    other, other_spread = measured.of("transformers", "load.engine")
    rows.append(
        make_row(
            f"{model.name}/load.engine",
            value,
            "s",
            spread=spread,
            peer="transformers",
            peer_value=other,
            peer_spread=other_spread,
            target=LOAD_TARGET,
        )
    )
    return rows


def _roof(model: Model, metric: str, roofs: dict[str, Any]) -> tuple[float, str]:
    """Tokens per second if only reading the weights (decode) or only multiplying (prefill) took time."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == metric)
    if scenario.kind == "decode":
        rate = float(roofs["stream"][str(model.weights_bytes)]) / model.weights_bytes * scenario.num_sequences
        return rate, "stream of the weights"
    return float(roofs["gemm_bf16"]) / prefill_flops_per_token(model, scenario.num_tokens), "bf16 GEMM"


def prefill_flops_per_token(model: Model, num_tokens: int) -> float:
    """Multiply-adds count as two; attention is causal; the head runs for the last token only.

    Linear layers: 2 x their weights. Attention in a layer: 4 x heads x head_dim x the mean number of keys.
    """
    config = json.loads((model.folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    kinds = config.get("layer_types") or ["full_attention"] * layers
    window = config.get("sliding_window") or num_tokens
    keys = sum(
        _mean_keys(num_tokens, window if kind == "sliding_attention" else num_tokens) for kind in kinds
    )
    head = 2 * hidden * config["vocab_size"] / num_tokens
    return float(2 * layers * (attention + mlp) + 4 * heads * head_dim * keys + head)


def _mean_keys(num_tokens: int, window: int) -> float:
    """Keys that a causal token attends to, on average, with at most ``window``."""
    if num_tokens <= window:
        return (num_tokens + 1) / 2
    return (window * (window + 1) / 2 + (num_tokens - window) * window) / num_tokens
