"""Plain C++ kernels behind every op, against the reference in float64; and what falls through."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.errors import EngineError, PackError
from headrace.core.packs import KernelEntry
from headrace.kernels.native.op import NativeKernel, NativeOp, make_op
from headrace.kernels.native.signature import SIGNATURES
from headrace.kernels.native.store import WeightStore
from headrace.kernels.native.weight_sets import weight_sets
from headrace.kernels.table import OpTable
from headrace.kernels.weights import DecoderWeights, Norm
from tests.kernels.native.conftest import GetKernel
from tests.kernels.native.layers import (
    DECODES,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    MIXED,
    Step,
    error,
    in_float64,
    make_weights,
    wide_linear,
    wide_norm,
)

DTYPES = ((torch.float32, 2e-5), (torch.bfloat16, 2e-2))
REFERENCE = OpTable.reference()
TORCH_BRINGS_LIBGOMP = any((Path(torch.__file__).parent / "lib").glob("libgomp*"))


class Fallback:
    """What an op falls back to: counts, and gives ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Tensor:
        self.calls.append(arguments)
        return torch.ones(1)


def never(*arguments: Any) -> Tensor:
    raise AssertionError("fell through")


def native(
    kernel: NativeKernel,
    op: str,
    weights: DecoderWeights,
    fallback: Callable[..., Tensor] = never,
    **conditions: Any,
) -> NativeOp:
    """A prepared op that covers everything but for ``conditions``."""
    weight_dtype = str(weights.head.dtype).removeprefix("torch.")
    entry = {"phases": ["decode", "prefill"], "max_rows": 1000, "weight_formats": [weight_dtype]} | conditions
    made = make_op(kernel, KernelEntry(op=op, source="x.cpp", **entry), fallback)
    made.prepare(weights, WeightStore())
    return made


def table(made: NativeOp) -> OpTable:
    return REFERENCE.replace(**{made.signature.op: made})


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_ops_on_rows(kernel: GetKernel, family: str, dtype: torch.dtype, tolerance: float) -> None:
    weights = make_weights(family, dtype)
    layer = weights.layers[1]
    mlp, packed = layer.mlp, layer.attention.qkv
    ops = {
        op: native(kernel(op), op, weights)
        for op in ("linear", "gated_linear", "mlp_block", "rms_norm", "logits_head", "activation_and_mul")
    }
    ours = REFERENCE.replace(**ops)
    wide = in_float64(layer)
    with torch.inference_mode():
        for rows in (1, 5, 1):
            x = random(rows, HIDDEN, dtype=dtype)
            more = random(rows, packed.out_features, dtype=dtype)
            expected = REFERENCE.linear(x.double(), wide.attention.qkv, more.double())
            assert error(ours.linear(x, packed, more), expected) < tolerance
            expected = REFERENCE.linear(x.double(), wide.attention.qkv)
            assert error(ours.linear(x, packed), expected) < tolerance
            # not contiguous
            assert error(ours.linear(x.t().contiguous().t(), packed), expected) < tolerance
            expected = REFERENCE.gated_linear(x.double(), wide.mlp.gate_up, mlp.activation)
            assert error(ours.gated_linear(x, mlp.gate_up, mlp.activation), expected) < tolerance
            for residual in (None, x):
                expected = REFERENCE.mlp_block(
                    x.double(), wide.mlp, None if residual is None else residual.double()
                )
                out = ours.mlp_block(x, mlp, residual)
                assert out.dtype is dtype
                assert error(out, expected) < tolerance
            norm, wide_final = weights.final_norm, wide_norm(weights.final_norm)
            assert wide_final is not None
            assert error(ours.rms_norm(x, norm), REFERENCE.rms_norm(x.double(), wide_final)) < tolerance
            expected = REFERENCE.logits_head(x.double(), wide_linear(weights.head), weights.softcap)
            logits = ours.logits_head(x, weights.head, weights.softcap)
            assert logits.dtype is torch.float32
            assert error(logits, expected) < tolerance
            for activation in ("silu", "gelu", "gelu_tanh"):
                expected = REFERENCE.activation_and_mul(x.double(), activation)
                assert error(ours.activation_and_mul(x, activation), expected) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_norm_of_heads(kernel: GetKernel, dtype: torch.dtype, tolerance: float) -> None:
    weights = make_weights("gemma", dtype)
    norm = weights.layers[0].attention.q_norm
    assert norm is not None
    heads = random(3, HEADS * HEAD_DIM + 7, dtype=dtype)[:, :-7].view(3, HEADS, HEAD_DIM)
    out = native(kernel("rms_norm"), "rms_norm", weights)(heads, norm)
    expected = REFERENCE.rms_norm(heads.double(), Norm(norm.weight.double(), norm.eps, norm.offset))
    assert error(out, expected) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rope_in_place(kernel: GetKernel, dtype: torch.dtype, tolerance: float) -> None:
    made = native(kernel("rope"), "rope", make_weights("llama", dtype))
    for rows in (3, 1, 3):
        step = Step.random(((7, 1),) * rows, dtype, HEAD_DIM)
        inner = random(rows, (HEADS + 1) * HEAD_DIM, dtype=dtype)
        heads = inner[:, HEAD_DIM:].view(rows, HEADS, HEAD_DIM)
        expected = REFERENCE.rope(heads.double(), step.cos.double(), step.sin.double())
        before = inner[:, :HEAD_DIM].clone()
        assert made(heads, step.cos, step.sin) is heads
        assert error(heads, expected) < tolerance
        assert torch.equal(inner[:, :HEAD_DIM], before)


@pytest.mark.parametrize("entries", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_ops_on_a_batch(
    kernel: GetKernel,
    family: str,
    dtype: torch.dtype,
    tolerance: float,
    entries: tuple[tuple[int, int], ...],
) -> None:
    weights = make_weights(family, dtype)
    attention = table(native(kernel("attention"), "attention", weights))
    block = table(native(kernel("attention_block"), "attention_block", weights))
    whole = table(native(kernel("decoder_layer"), "decoder_layer", weights))
    with torch.inference_mode():
        # two steps and two layers: everything that changes between calls has changed
        for seed, changed in ((1, entries), (2, entries[1:])):
            for layer in weights.layers:
                spec, wide_layer = layer.attention.spec, in_float64(layer)
                step = Step.random(changed, dtype, spec.v_head_dim, seed)
                for ours in (attention, block, whole):
                    wide, kv = step.wide(), fresh(step)
                    out = ours.decoder_layer(step.x, layer, step.cos, step.sin, kv, step.batch)
                    expected = REFERENCE.decoder_layer(
                        wide.x, wide_layer, wide.cos, wide.sin, wide.kv, wide.batch
                    )
                    assert out.dtype is dtype
                    assert error(out, expected) < tolerance
                    assert error(kv.keys, wide.kv.keys) < tolerance
                    assert error(kv.values, wide.kv.values) < tolerance
                expected = REFERENCE.attention_block(
                    wide.x, wide_layer.attention, wide.cos, wide.sin, wide.kv, wide.batch, wide.x
                )
                out = block.attention_block(
                    step.x, layer.attention, step.cos, step.sin, fresh(step), step.batch, step.x
                )
                assert error(out, expected) < tolerance


def fresh(step: Step) -> Any:
    """The step's cache as it was, in the step's dtype."""
    kv = step.wide().kv
    heads, slots, dim = kv.keys.shape
    copy = type(kv).allocate(
        slots // kv.block_size, kv.block_size, heads, dim, kv.v_head_dim, dtype=step.x.dtype
    )
    copy.keys.copy_(kv.keys)
    copy.values.copy_(kv.values)
    return copy


def test_weights_in_stock_forms_reach_the_kernel_dense(kernel: GetKernel) -> None:
    """oneDNN's layout, FBGEMM's packs and a gated pair held in two."""
    stock = OpTable.stock("cpu", torch.bfloat16)
    weights = make_weights("llama", torch.bfloat16, stock)
    made = native(kernel("decoder_layer"), "decoder_layer", weights)
    head = native(kernel("logits_head"), "logits_head", weights)
    layer = weights.layers[0]
    plain = make_weights("llama", torch.bfloat16)
    step = Step.random(DECODES, torch.float32, HEAD_DIM)
    wide = step.wide()
    out = stock.replace(decoder_layer=made).decoder_layer(
        step.x, layer, step.cos, step.sin, step.kv, step.batch
    )
    expected = REFERENCE.decoder_layer(
        wide.x, in_float64(plain.layers[0]), wide.cos, wide.sin, wide.kv, wide.batch
    )
    assert error(out, expected) < 1e-4
    expected = REFERENCE.logits_head(step.x.double(), wide_linear(plain.head))
    assert error(head(step.x, weights.head), expected) < 1e-4
    held = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    assert made.nbytes == 2 * 2 * sum(p.in_features * p.out_features for p in held)
    assert native(kernel("decoder_layer"), "decoder_layer", plain).nbytes == 0  # the model's own memory


def test_packed_weights(kernel: GetKernel) -> None:
    weights = make_weights("olmo", torch.bfloat16)
    fallback = Fallback()
    made = native(kernel("packed_linear"), "linear", weights, fallback)
    layer = weights.layers[0]
    x = random(2, HIDDEN)
    more = random(2, layer.attention.qkv.out_features)
    expected = REFERENCE.linear(x.double(), wide_linear(layer.attention.qkv), more.double())
    assert error(made(x, layer.attention.qkv, more), expected) < 1e-5
    assert not fallback.calls
    # it declined this one: too wide
    made(random(2, layer.mlp.down.in_features), layer.mlp.down)
    assert len(fallback.calls) == 1
    covered = [p for p in (found.owner for found in weight_sets("linear", weights)) if p.in_features <= 64]
    assert made.nbytes == sum(16 + 4 * p.out_features * (p.in_features + 1) for p in covered)


def test_calls_outside_its_conditions_fall_through(kernel: GetKernel) -> None:
    weights = make_weights("llama", torch.bfloat16)
    packed = weights.layers[0].attention.qkv
    fallback = Fallback()
    made = native(kernel("linear"), "linear", weights, fallback, max_rows=2, activation_dtypes=["float32"])
    assert made(random(2, HIDDEN), packed).shape == (2, packed.out_features)
    assert not fallback.calls
    unknown = make_weights("llama", torch.bfloat16).layers[0].attention.qkv
    refused = (
        (random(3, HIDDEN), packed, None),
        (random(2, HIDDEN, dtype=torch.bfloat16), packed, None),
        (random(2, HIDDEN), unknown, None),
        (random(2, HIDDEN + 1), packed, None),
        (random(0, HIDDEN), packed, None),
        (random(2, HIDDEN), packed, random(1, packed.out_features)),
    )
    for arguments in refused:
        assert torch.equal(made(*arguments), torch.ones(1))
        assert fallback.calls.pop() == arguments
    assert made(random(1, HIDDEN), packed).shape == (1, packed.out_features)


def test_phases_and_composites_fall_through(kernel: GetKernel) -> None:
    """A mixed step is prefill; a composite's fallback gets the table it was called through."""
    weights = make_weights("llama", torch.float32)
    layer = weights.layers[0]
    fallback = Fallback()
    made = native(kernel("decoder_layer"), "decoder_layer", weights, fallback, phases=["decode"])
    ours = table(made)
    for entries, falls in ((DECODES, 0), (MIXED, 1)):
        step = Step.random(entries, torch.float32, HEAD_DIM)
        ours.decoder_layer(step.x, layer, step.cos, step.sin, step.kv, step.batch)
        assert len(fallback.calls) == falls
    assert fallback.calls[0][0] is ours
    real = native(
        kernel("decoder_layer"), "decoder_layer", weights, REFERENCE.unbound("decoder_layer"), max_rows=1
    )
    step = Step.random(MIXED, torch.float32, HEAD_DIM)
    wide = step.wide()
    out = table(real).decoder_layer(step.x, layer, step.cos, step.sin, step.kv, step.batch)
    expected = REFERENCE.decoder_layer(wide.x, in_float64(layer), wide.cos, wide.sin, wide.kv, wide.batch)
    assert error(out, expected) < 2e-5


SAYS = """
#include "headrace_kernel.h"
extern "C" int hr_run(const hr_call *call) { return call->tensors[0].shape[0] == 1 ? %d : 0; }
"""


@pytest.mark.parametrize("status", [1, -7])
def test_not_mine_falls_through_and_failure_is_an_error(
    build_text: Callable[[str], NativeKernel], status: int
) -> None:
    weights = make_weights("llama", torch.float32)
    fallback = Fallback()
    made = native(build_text(SAYS % status), "mlp_block", weights, fallback)
    mlp = weights.layers[0].mlp
    made(REFERENCE, random(2, HIDDEN), mlp)
    assert not fallback.calls
    if status == 1:
        assert torch.equal(made(REFERENCE, random(1, HIDDEN), mlp), torch.ones(1))
        assert len(fallback.calls) == 1
    else:
        with pytest.raises(EngineError, match="mlp_block failed: hr_run gave -7"):
            made(REFERENCE, random(1, HIDDEN), mlp)


def test_weights_that_no_kernel_covers(kernel: GetKernel) -> None:
    weights = make_weights("llama", torch.float32)
    with pytest.raises(PackError, match="covers none"):
        native(kernel("linear"), "linear", weights, weight_formats=["bfloat16"])
    with pytest.raises(PackError, match="no kernel can provide"):
        native(kernel("linear"), "embedding", weights)


def test_threads_and_profiler(build_text: Callable[[str], NativeKernel]) -> None:
    """The kernel is told torch's number of threads, shares its OpenMP, and the profiler sees its calls."""
    source = """
    #include <omp.h>
    #include "headrace_kernel.h"
    extern "C" int hr_run(const hr_call *call) {
        float *out = (float *)call->tensors[2].data;
        out[0] = (float)call->threads;
        out[1] = (float)omp_get_max_threads();
        return 0;
    }
    """
    weights = make_weights("llama", torch.float32)
    made = native(build_text(source), "rms_norm", weights)
    x, norm = random(1, HIDDEN), weights.final_norm
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen = made(x, norm)[0]
            assert seen[0] == threads
            # two runtimes would be two sets of threads that spin against each other
            assert not TORCH_BRINGS_LIBGOMP or seen[1] == threads
    finally:
        torch.set_num_threads(before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        made(x, norm)
    assert "headrace::rms_norm" in {event.key for event in profile.key_averages()}


def test_call_overhead_is_printed(build_text: Callable[[str], NativeKernel]) -> None:
    weights = make_weights("llama", torch.float32)
    done = build_text('#include "headrace_kernel.h"\nextern "C" int hr_run(const hr_call *) { return 0; }')
    layer = weights.layers[0]
    step = Step.random(((40, 1),), torch.float32, HEAD_DIM)
    ours = table(native(done, "decoder_layer", weights))
    made = native(done, "linear", weights)
    with torch.inference_mode():
        for name, call in (
            (
                "decoder_layer",
                lambda: ours.decoder_layer(step.x, layer, step.cos, step.sin, step.kv, step.batch),
            ),
            ("linear", lambda: made(step.x, layer.attention.qkv)),
            ("empty_like", lambda: torch.empty_like(step.x)),
        ):
            best = min(timed(call) for _ in range(5))
            print(f"{name}: {best * 1e6:.2f} us a call")


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(2000):
        call()
    return (time.perf_counter() - began) / 2000


def test_every_op_of_a_table_has_a_signature() -> None:
    without = {"embedding", "pack_linear"}
    assert set(SIGNATURES) == set(OpTable.names()) - without
