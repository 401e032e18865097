"""The start-up probe: does a Transformers model compute the same under our attention as under its own?

1. One sequence, masks that tell: every layer must call the attention interface once, with a causal mask
   or a sliding window, and with nothing that the paged attention does not know.
2. Three ragged sequences in chunks over a scattered cache, as in service: every position's logits must
   equal those of Transformers' eager attention on each sequence alone. What mixes tokens elsewhere than in
   attention (recurrence, convolution, ALiBi, positions counted by the model itself) shows here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import HeadraceError, UnsupportedModelError
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.models.attention_hook import PROBE, SERVE, Hook, Recording
from headrace.models.transformers_model import FallbackModel, base_name, run_base

BLOCK_SIZE = 4
LENGTHS = (11, 6, 1)
# (row, tokens) of each step; one-token parts come first
STEPS = (
    ((2, 1), (0, 5), (1, 5)),
    ((1, 1), (0, 6)),
)
# Relative root-mean-square error of all logits. Two wrong rows of 18 give 0.33; in bfloat16 an expert
# chosen otherwise on a near tie was seen to give 0.09.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


def probe_model(model: Any, ops: OpTable, dtype: torch.dtype, device: torch.device) -> FallbackModel:
    """The model wrapped for service. Raises UnsupportedModelError with the reason it cannot be served."""
    name = type(model).__name__
    try:
        with torch.inference_mode():
            return _probe(model, ops, dtype, device)
    except HeadraceError as error:
        raise UnsupportedModelError(
            f"{name} cannot be served: {error.message}",
            hint="Headrace serves causal models whose layers all use Transformers' attention interface",
        ) from error
    except Exception as error:
        # whatever a foreign definition does when called as it must be called in service
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise UnsupportedModelError(
            f"{name} cannot be served: it fails the start-up probe with {type(error).__name__}: {reason}"
        ) from error


def _probe(model: Any, ops: OpTable, dtype: torch.dtype, device: torch.device) -> FallbackModel:
    text = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder-decoder model")
    base_name(model)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, text.vocab_size, (length,), generator=generator) for length in LENGTHS]
    sequences = [sequence.to(device) for sequence in sequences]
    model.set_attn_implementation("eager")
    expected = [model(input_ids=tokens[None], use_cache=False).logits[0].float() for tokens in sequences]

    hook = Hook(model)
    model.set_attn_implementation(PROBE)
    longest = len(sequences[0])
    blocks = list(range(-(-longest // BLOCK_SIZE)))
    batch = AttentionBatch.build([BatchEntry(0, longest, blocks)], BLOCK_SIZE, device)
    recording = Recording(ops, batch, dtype)
    hidden = run_base(model, hook, recording, sequences[0], batch.positions)
    _check_layers(text, len(recording.specs))

    model.set_attn_implementation(SERVE)
    served = FallbackModel(model, hook, ops, recording.specs, hidden.shape[-1])
    got = _serve_ragged(served, sequences, dtype, device)
    error = _relative_error(torch.cat(got), torch.cat(expected))
    if not error <= TOLERANCE[dtype]:
        raise UnsupportedModelError(
            "in a batch of several sequences its logits differ from its own "
            f"(relative error {error:.2g}, {TOLERANCE[dtype]:g} allowed): something other than attention "
            "looks at neighbouring tokens or counts positions"
        )
    return served


def _check_layers(text: Any, calls: int) -> None:
    layers = text.num_hidden_layers
    if calls == layers:
        return
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    others = sorted({str(kind) for kind in kinds if "attention" not in str(kind) or "linear" in str(kind)})
    raise UnsupportedModelError(
        f"{calls} calls of the attention interface in {layers} layers"
        + (f" (layers of type {', '.join(others)} bypass it)" if others else "; the others bypass it")
    )


def _serve_ragged(
    served: FallbackModel, sequences: list[Tensor], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Each sequence's logits, computed in ``STEPS`` over blocks that are not in order."""
    kv = [
        LayerKV.allocate(16, BLOCK_SIZE, *spec, dtype=dtype, device=device) for spec in served.config.kv_specs
    ]
    tables = [[9, 2, 12], [5, 1], [14]]
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for parts in STEPS:
        entries = [BatchEntry(done[row], count, tables[row]) for row, count in parts]
        token_ids = torch.cat([sequences[row][done[row] : done[row] + count] for row, count in parts])
        batch = AttentionBatch.build(entries, BLOCK_SIZE, device)
        hidden = served.forward(token_ids, batch, kv)
        pieces = torch.split(served.logits(hidden), [count for _, count in parts])
        for (row, count), piece in zip(parts, pieces, strict=True):
            logits[row].append(piece)
            done[row] += count
    return [torch.cat(pieces) for pieces in logits]


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """Root-mean-square difference over the spread of each row's logits."""
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    return float((got - expected).square().mean().sqrt() / spread.clamp(min=1e-6))
