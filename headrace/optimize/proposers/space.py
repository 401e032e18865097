"""What the search may change about each template, and where it begins.

parameter   constant in the template                                       in
panels      panels of 16 outputs side by side in memory and registers      products
prefetch    bytes fetched ahead of a product's reads                       products
ahead       bytes of the next matrix fetched before a barrier              products
unroll      pairs of inputs in one turn of a product's loop                products
rows        rows computed together on float32 (panels * rows sums fit)     products
half_rows   the same on bfloat16                                           products
dot         1: bfloat16 rows multiply as bfloat16 pairs, 0: as float32     products
chunk       keys in one item of attention's work                           attention

Templates are generic: of a model they take its head sizes alone, as constants that unroll loops.
"""

from __future__ import annotations

from typing import TypeAlias

from headrace.optimize.records import Target

Parameters: TypeAlias = "dict[str, int]"

VALUES: dict[str, tuple[int, ...]] = {
    "panels": (1, 2, 4),
    "prefetch": (0, 1024, 2048, 4096, 8192, 12288),
    "ahead": (0, 4096, 8192, 16384, 32768),
    "unroll": (1, 2, 4),
    "rows": (2, 4, 8),
    "half_rows": (4, 8),
    "dot": (0, 1),
    "chunk": (64, 128, 256, 512),
}
"""In steps of the search: a neighbour has one parameter one place further."""

_PRODUCTS = ("prefetch", "panels", "unroll", "ahead", "rows", "half_rows", "dot")
SPACES: dict[str, tuple[str, ...]] = {
    "linear": _PRODUCTS,
    "gated_linear": _PRODUCTS,
    "mlp_block": _PRODUCTS,
    "logits_head": _PRODUCTS,
    "rms_norm": (),
    "attention": ("chunk",),
    "attention_block": (*_PRODUCTS, "chunk"),
    "decoder_layer": (*_PRODUCTS, "chunk"),
}
"""The parameters of each op that has a template, those that matter most first."""

_LANES = 16
# a thread's share of the stream at the latency of memory: 45 GB/s for some 90 ns
_BYTES_IN_FLIGHT = 4096
_UNEVEN = 1.04


def first_guess(target: Target, threads: int) -> Parameters:
    """Where the roofline says to begin.

    With few rows a call is as long as its weights take to be read: enough bytes in flight, and panels only
    as wide as the matrices still divide evenly among the threads. With many rows the products bound it: as
    many rows in registers as fit.
    """
    rows = max((shape.rows for shape in target.shapes), default=1)
    context = max((shape.context for shape in target.shapes), default=0)
    panels = next(
        (
            width
            for width in (4, 2)
            if _unevenness(target.dims, width, threads) <= _UNEVEN and width * rows <= 8
        ),
        2,
    )
    guess = {
        "panels": panels,
        "prefetch": _BYTES_IN_FLIGHT,
        "ahead": 2 * _BYTES_IN_FLIGHT,
        "unroll": 2,
        "rows": min(4, 8 // panels),
        "half_rows": min(8, 16 // panels),
        "dot": 1,
        # a lone row needs several items for every thread, a long one few enough to join
        "chunk": 64 if context < 512 and rows < threads else 128 if context < 4096 else 256,
    }
    return {name: guess[name] for name in SPACES[target.op]}


def worth_changing(target: Target) -> tuple[str, ...]:
    """The op's parameters that the target's own shapes can feel, those that matter most first."""
    rows = {dtype: [s.rows for s in target.shapes if s.dtype == dtype] for dtype in ("float32", "bfloat16")}
    idle = set()
    if max(rows["float32"], default=0) < 2:
        idle.add("rows")
    if max(rows["bfloat16"], default=0) < 5:
        idle.add("half_rows")
    if not rows["bfloat16"]:
        idle.add("dot")
    if target.op in ("linear", "gated_linear", "logits_head"):  # no matrix follows
        idle.add("ahead")
    return tuple(name for name in SPACES[target.op] if name not in idle)


def moved(parameters: Parameters, name: str, step: int) -> Parameters | None:
    """The same with one parameter ``step`` places further; None where that changes nothing or is beyond
    the last. Rows that do not fit the registers beside the panels are cut, as the template does."""
    values = VALUES[name]
    place = values.index(parameters[name]) + step
    if not 0 <= place < len(values):
        return None
    there = {**parameters, name: values[place]}
    for rows, registers in (("rows", 8), ("half_rows", 16)):
        if rows in there:
            there[rows] = min(there[rows], registers // there["panels"])
    return None if there == parameters else there


def constants(target: Target, parameters: Parameters) -> dict[str, int]:
    """The template's constants: the parameters, and what it takes of the model."""
    found = {name.upper(): value for name, value in parameters.items()}
    dims = target.dims
    if "chunk" in SPACES[target.op]:
        found["HEAD_DIM"] = dims["head_dim"]
        found["V_HEAD_DIM"] = dims["v_head_dim"]
        found["FAN"] = dims["num_heads"] // dims["num_kv_heads"]
    found["MAX_ROWS"] = target.max_rows
    return found


def _unevenness(dims: dict[str, int], panels: int, threads: int) -> float:
    """The busiest thread's units over an even share, for the worst of the op's matrices."""
    outputs = [dims[name] for name in ("hidden_size", "out_features", "intermediate_size") if name in dims]
    if "num_heads" in dims and "hidden_size" in dims:
        heads = (dims["num_heads"] + dims["num_kv_heads"]) * dims["head_dim"]
        outputs.append(heads + dims["num_kv_heads"] * dims["v_head_dim"])
    worst = 1.0
    for count in outputs:
        units = -(-count // (_LANES * panels))
        worst = max(worst, -(-units // threads) * threads * _LANES * panels / count)
    return worst
