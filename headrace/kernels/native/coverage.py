"""What of a model native ops compute, in words and as a promise."""

from __future__ import annotations

from headrace.kernels.native.op import NativeOp
from headrace.kernels.native.weight_sets import weight_sets
from headrace.kernels.table import OpTable
from headrace.kernels.weights import DecoderWeights

_WHOLE = ("decoder_layer", "rms_norm", "logits_head")
"""Ops that make up a whole step, but for the embedding, which only copies."""


def native_ops(table: OpTable) -> dict[str, NativeOp]:
    """Ops of a table that are native, by name."""
    found = {name: table.unbound(name) for name in table.names()}
    return {name: op for name, op in found.items() if isinstance(op, NativeOp)}


def describe_coverage(table: OpTable, weights: DecoderWeights) -> str:
    """The native ops, the largest first; of those that do not cover all weights, how much and why:
    ``decoder_layer (28 of 30: it does not read q5_0), logits_head``."""
    words = []
    for name, op in reversed(native_ops(table).items()):
        sets = weight_sets(name, weights)
        left = [found for found in sets if not op.covers(found.owner)]
        if not left:
            words.append(name)
            continue
        formats = {form for found in left for packed in found.linears.values() for form in packed.formats}
        unread = sorted(formats - set(op.entry.weight_formats))
        why = f"it does not read {', '.join(unread)}" if unread else "not the shapes of the others"
        words.append(f"{name} ({len(sets) - len(left)} of {len(sets)}: {why})")
    return ", ".join(words)


def computes_steps(table: OpTable, weights: DecoderWeights) -> bool:
    """Whether native ops compute all layers and the head of every step, so that nobody else reads their
    weights. A ``linear`` may also say of itself that it reads weights in the forms that those do."""
    if getattr(table.unbound("linear"), "reads_blocks", False):
        return True
    ops = native_ops(table)
    layer, head = ops.get("decoder_layer"), ops.get("logits_head")
    if layer is None or head is None or not {"decode", "prefill"} <= set(layer.entry.phases):
        return False
    if layer.entry.max_rows or head.entry.max_rows:
        return False
    return all(layer.covers(owner) for owner in weights.layers) and head.covers(weights.head)


def is_batch_invariant(table: OpTable, weights: DecoderWeights) -> bool:
    """Whether a token's bits depend on nothing but the tokens before it: every part of every step is computed
    by kernels that promise so."""
    found = native_ops(table)
    ops = [found.get(name) for name in _WHOLE]
    if not all(op is not None and op.entry.batch_invariant and op.entry.max_rows == 0 for op in ops):
        return False
    return computes_steps(table, weights) and found["rms_norm"].covers(weights.final_norm)
