"""What `bench engine` measured, turned into rows with the bounds that they are held to."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.contenders import SCENARIOS, Model
from benchmarks.forms import FORMS, Form, has_server
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
KL_TARGET = Target("ratio", "<=", 1.0)
NEIGHBOUR_TARGET = Target("ratio", ">=", 0.5)
AHEAD = Target("ratio", ">", 1.0)
BEST_MODEL = "smollm2-135m"
BEST = {"tg64x8": 2.0, "pp512": 1.2, "pp2048": 1.2, "http.output": 1.5}
BEST_DECODE = {"bf16": 1.5, "8-bit": 2.5, "file": 2.5}
"""Bounds on the ratio to the best peer of a form; of any other model and metric: ahead."""
SAME_BITS = 0.05
NEIGHBOUR = "tg128.neighbour"
STREAM = "stream"
"""Bytes per second of reads at the footprint of the side, beside its tg128."""
_UNITS = {
    **{scenario.name: "tok/s" for scenario in SCENARIOS},
    "http.output": "tok/s",
    "http.ttft": "ms",
    "http.tpot": "ms",
    "http.ready": "s",
    "http.memory": "GiB",
    "load.ready": "s",
    "memory": "GiB",
    "bits": "bits",
    "kl": "nats",
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


def rows_of(model: Model, sides: list[str], measured: Measurements, gemm: float, *, http: bool) -> list[Row]:
    """Our figure in each form beside each peer's, the best peer's, and the machine's roof.

    ``gemm``: operations per second of a product in bfloat16.
    """
    rows = []
    for form in FORMS:
        peers = [side for side in form.peers if side in sides]
        if form.ours in sides:
            rows += _form_rows(model, form, peers, measured, gemm, http=http)
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


def _form_rows(
    model: Model, form: Form, peers: list[str], measured: Measurements, gemm: float, *, http: bool
) -> list[Row]:
    rows = []
    ours = form.ours
    names = {scenario.name for scenario in SCENARIOS}
    for metric, unit in _UNITS.items():
        served = metric.startswith("http.")
        if served and not http:
            continue
        value, spread = measured.of(ours, metric)
        for peer in peers:
            if (served and not has_server(peer)) or (metric == "load.ready" and peer.startswith("llama")):
                continue
            peer_value, peer_spread = measured.of(peer, metric)
            reasons = [measured.why.get(f"{side} server" if served else side) for side in (ours, peer)]
            reasons.append(_other_bits(measured, ours, peer))
            rows.append(
                make_row(
                    f"{model.name}/{metric}/{peer}",
                    value,
                    unit,
                    spread=spread,
                    peer=peer,
                    peer_value=peer_value,
                    peer_spread=peer_spread,
                    target=KL_TARGET if metric == "kl" else TARGETS.get((metric, peer)),
                    note="; ".join(reason for reason in reasons if reason),
                )
            )
        if metric in names or metric == "http.output":
            rows.append(_best_row(model, form, metric, peers, measured))
        if metric in names:
            rows.append(_roof_row(model, form, metric, measured, gemm))
    quiet, _ = measured.of(ours, "tg128")
    value, spread = measured.of(ours, NEIGHBOUR)
    if value is not None:
        rows.append(
            make_row(
                f"{model.name}/{NEIGHBOUR}/{ours}",
                value,
                "tok/s",
                spread=spread,
                peer="itself, quiet",
                peer_value=quiet,
                target=NEIGHBOUR_TARGET,
            )
        )
    return rows


def _other_bits(measured: Measurements, ours: str, peer: str) -> str:
    """Why two sides are not comparable, or nothing."""
    value, other = measured.of(ours, "bits")[0], measured.of(peer, "bits")[0]
    if value is None or other is None or abs(other / value - 1) <= SAME_BITS:
        return ""
    return f"not at equal bits: {value:.2f} and {other:.2f} a weight"


def _best_row(model: Model, form: Form, metric: str, peers: list[str], measured: Measurements) -> Row:
    """Beside the fastest peer at equal bits."""
    value, spread = measured.of(form.ours, metric)
    rated = [
        (rate, peer)
        for peer in peers
        if (rate := measured.of(peer, metric)[0]) is not None and not _other_bits(measured, form.ours, peer)
    ]
    best, peer = max(rated, default=(None, "none"))
    target = AHEAD
    if model.name == BEST_MODEL:
        bound = BEST_DECODE[form.name] if metric == "tg128" else BEST[metric]
        target = Target("ratio", ">=", bound)
    return make_row(
        f"{model.name}/{metric}/best at {form.name}",
        value,
        _UNITS[metric],
        spread=spread,
        peer=peer,
        peer_value=best,
        peer_spread=measured.of(peer, metric)[1],
        target=target,
    )


def _roof_row(model: Model, form: Form, metric: str, measured: Measurements, gemm: float) -> Row:
    """Beside the rate if only reading the weights (decode) or only multiplying (prefill) took time."""
    value, spread = measured.of(form.ours, metric)
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == metric)
    roof: float | None
    if scenario.kind == "decode":
        stream, bits = measured.of(form.ours, STREAM)[0], measured.of(form.ours, "bits")[0]
        if stream is None or bits is None:
            roof = None
        else:
            roof = stream / footprint(model, bits) * scenario.num_sequences
        name = "stream of the weights"
    else:
        roof, name = gemm / prefill_flops_per_token(model, scenario.num_tokens), "bf16 GEMM"
    return make_row(
        f"{model.name}/{metric}/roof at {form.name}",
        value,
        "tok/s",
        spread=spread,
        peer=name,
        peer_value=roof,
        target=Target("ratio", ">=", form.stream) if metric == "tg128" else None,
    )


def footprint(model: Model, bits: float) -> int:
    """Bytes that a decode step reads of the weights."""
    return int(model.num_weights * bits / 8)


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
