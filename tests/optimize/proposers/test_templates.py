"""Every template against the float64 reference on small models of each kind, built with this compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.errors import CompilerMissingError
from headrace.core.packs import KernelEntry
from headrace.kernels import batch as batches
from headrace.kernels.native.build import compile_kernel, find_compiler
from headrace.kernels.native.op import NativeKernel, NativeOp, make_op
from headrace.kernels.native.store import WeightStore
from headrace.kernels.table import OpTable
from headrace.kernels.weights import DecoderWeights
from headrace.optimize.proposers.source import write_source
from headrace.optimize.proposers.space import SPACES
from tests.kernels.native.layers import (
    FAMILIES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Step,
    in_float64,
    make_weights,
    wide_linear,
)

DTYPES = {"float32": 1e-3, "bfloat16": 8e-3}
"""Largest error of a row's size; in float32 what is left is a cached number that rounds the other way."""
ENTRIES = ((40, 1), (3, 1), (0, 1), (150, 1), (15, 1), (16, 1), (17, 1), (70, 1))
SETTINGS = {
    "first": {},
    "narrow": {"PANELS": 1, "UNROLL": 1, "ROWS": 8, "PREFETCH": 0, "AHEAD": 0, "CHUNK": 64},
    "wide": {"PANELS": 4, "UNROLL": 4, "ROWS": 2, "HALF_ROWS": 4, "CHUNK": 16, "DOT": 0},
}

GetOp = Callable[..., NativeOp]


def unreachable(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the kernel did not cover the call")


@pytest.fixture(scope="session")
def get_op(tmp_path_factory: pytest.TempPathFactory) -> GetOp:
    """A template's op, prepared for ``weights``; each source is built once."""
    try:
        find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("templates")

    def get(op: str, weights: DecoderWeights, *, flags: tuple[str, ...] = (), **settings: int) -> NativeOp:
        v_dim = weights.layers[0].attention.spec.v_head_dim
        sizes = {"HEAD_DIM": HEAD_DIM, "V_HEAD_DIM": v_dim, "FAN": HEADS // KV_HEADS}
        source = folder / f"{op}-{abs(hash((op, v_dim, tuple(settings.items()))))}.cpp"
        source.write_text(write_source(op, {**sizes, "MAX_ROWS": 64 if op == "rms_norm" else 8, **settings}))
        entry = KernelEntry(op=op, source=source.name, max_rows=64 if op == "rms_norm" else 8)
        library: Path = compile_kernel(source, flags, folder, timeout_s=600)
        made = make_op(NativeKernel(library), entry, unreachable)
        made.prepare(weights, WeightStore())
        return made

    return get


def make_step(dtype: str, weights: DecoderWeights) -> Step:
    step = Step.random(ENTRIES, torch.bfloat16, weights.layers[0].attention.spec.v_head_dim)
    kind = getattr(torch, dtype)
    return replace(step, x=step.x.to(kind), cos=step.cos.to(kind), sin=step.sin.to(kind))


def copy_of(step: Step) -> Step:
    kv = type(step.kv).allocate(
        step.kv.keys.shape[1] // step.kv.block_size,
        step.kv.block_size,
        step.kv.num_kv_heads,
        step.kv.head_dim,
        step.kv.v_head_dim,
        step.kv.keys.dtype,
    )
    kv.keys.copy_(step.kv.keys)
    kv.values.copy_(step.kv.values)
    return replace(step, kv=kv)


def run_layers(ops: OpTable, weights: DecoderWeights, step: Step) -> list[Tensor]:
    """Each layer on the same input."""
    return [
        ops.decoder_layer(step.x.clone(), layer, step.cos, step.sin, step.kv, step.batch)
        for layer in weights.layers
    ]


def expected(weights: DecoderWeights, step: Step) -> list[Tensor]:
    wide = replace(step.wide(), kv=copy_of(step).kv)
    return [
        OpTable.reference().decoder_layer(wide.x, in_float64(layer), wide.cos, wide.sin, wide.kv, wide.batch)
        for layer in weights.layers
    ]


def check(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.double() - wanted).abs().amax(-1) / wanted.abs().amax(-1)
    assert float(error.max()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("op", sorted(set(SPACES) - {"logits_head"}))
def test_a_layer_with_a_templates_op_computes_what_the_reference_does(
    op: str, family: str, dtype: str, get_op: GetOp
) -> None:
    weights = make_weights(family, torch.bfloat16)
    step = make_step(dtype, weights)
    wanted = expected(weights, step)
    replaced: dict[str, Any] = {op: get_op(op, weights)}
    ops = OpTable.reference().replace(**replaced)
    for found, truth in zip(run_layers(ops, weights, step), wanted, strict=True):
        # the parts that stay plain torch round to bfloat16 after each
        check(found, truth, DTYPES[dtype] * (1 if op == "decoder_layer" else 3))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_settings_change_no_layer(setting: str, family: str, get_op: GetOp) -> None:
    weights = make_weights(family, torch.bfloat16)
    op = get_op("decoder_layer", weights, **SETTINGS[setting])
    ops = OpTable.reference().replace(decoder_layer=op)
    for dtype, tolerance in DTYPES.items():
        step = make_step(dtype, weights)
        wanted = expected(weights, step)
        for found, truth in zip(run_layers(ops, weights, step), wanted, strict=True):
            check(found, truth, tolerance)


def test_without_vector_extensions_it_computes_the_same(get_op: GetOp) -> None:
    weights = make_weights("gemma", torch.bfloat16)
    op = get_op("decoder_layer", weights, flags=("-march=x86-64",), UNROLL=1)
    step = make_step("float32", weights)
    wanted = expected(weights, step)
    for found, truth in zip(
        run_layers(OpTable.reference().replace(decoder_layer=op), weights, step), wanted, strict=True
    ):
        check(found, truth, DTYPES["float32"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_result_depends_on_neither_its_batch_nor_the_threads(
    family: str, dtype: str, get_op: GetOp
) -> None:
    weights = make_weights(family, torch.bfloat16)
    ops = OpTable.reference().replace(decoder_layer=get_op("decoder_layer", weights))
    step = make_step(dtype, weights)
    together = run_layers(ops, weights, copy_of(step))
    assert all(map(torch.equal, together, run_layers(ops, weights, copy_of(step))))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, together, run_layers(ops, weights, copy_of(step))))
    finally:
        torch.set_num_threads(threads)
    for row in range(len(ENTRIES)):
        one = slice(row, row + 1)
        batch = step.batch
        alone = replace(
            copy_of(step),
            x=step.x[one],
            cos=step.cos[one].contiguous(),
            sin=step.sin[one].contiguous(),
            batch=batches.AttentionBatch(
                positions=batch.positions[one],
                slot_mapping=batch.slot_mapping[one],
                num_decodes=1,
                decode_block_tables=batch.decode_block_tables[one],
                decode_lens=batch.decode_lens[one],
                decode_lens_list=batch.decode_lens_list[one],
                prefills=[],
                block_size=batch.block_size,
            ),
        )
        for found, whole in zip(run_layers(ops, weights, alone), together, strict=True):
            assert torch.equal(found, whole[one])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_gives_float32_logits(family: str, dtype: str, get_op: GetOp) -> None:
    weights = make_weights(family, torch.bfloat16)
    op = get_op("logits_head", weights)
    x = make_step(dtype, weights).x
    logits = op(x, weights.head, weights.softcap)
    assert logits.dtype is torch.float32
    wanted = OpTable.reference().logits_head(x.double(), wide_linear(weights.head), weights.softcap)
    check(logits, wanted, 1e-5)


def test_a_cache_in_float32_is_not_its_own(get_op: GetOp) -> None:
    weights = make_weights("llama", torch.bfloat16)
    ops = OpTable.reference().replace(decoder_layer=get_op("decoder_layer", weights))
    step = Step.random(ENTRIES, torch.float32, HEAD_DIM)
    with pytest.raises(AssertionError, match="did not cover"):
        run_layers(ops, weights, step)
