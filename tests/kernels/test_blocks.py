"""Weights in quantized blocks: the buffer, the numbers in it, and stock operators on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels.block_layout import BLOCK_SIZES, TYPES, TensorType, header, lay_out
from headrace.kernels.blocks import (
    buffer_formats,
    check_buffer,
    count_elements,
    dense_blocks,
    join_blocks,
    lookup,
    quantize_blocks,
    read_parts,
)
from headrace.kernels.dequantize import dequantize, q8_0_of_q5_0
from headrace.kernels.stock import embedding_float32
from headrace.kernels.table import OpTable
from headrace.kernels.weights import PackedLinear, blocks_linear

WIDTH = 256
HALVES = {"q4_0": (0,), "q8_0": (0,), "q4_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def random_blocks(name: str, rows: int, width: int = WIDTH) -> Tensor:
    """Blocks with random bits and scales of a common size: (rows, bytes of a row)."""
    elements, block_bytes = BLOCK_SIZES[TYPES[name]]
    rng = np.random.default_rng(rows)
    blocks = rng.integers(0, 256, (rows * width // elements, block_bytes), np.uint8)
    for at in HALVES.get(name, ()):
        scales = rng.uniform(0.5, 1.5, len(blocks)).astype(np.float16) / np.float16(100)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "bfloat16":
        values = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
        return values.view(torch.uint8).clone()
    return torch.from_numpy(blocks).view(rows, -1)


def dense(name: str, blocks: Tensor) -> Tensor:
    return torch.from_numpy(dequantize(blocks.numpy(), TYPES[name])).view(blocks.shape[0], -1)


def mixture() -> tuple[Tensor, Tensor]:
    """A buffer of every format, and the numbers in it."""
    parts = [(name, random_blocks(name, 3 + i)) for i, name in enumerate(TYPES)]
    return join_blocks(parts, WIDTH), torch.cat([dense(name, blocks) for name, blocks in parts])


def test_a_buffer_says_what_it_holds() -> None:
    buffer, numbers = mixture()
    parts = read_parts(buffer)
    assert [part.format for part in parts] == list(TYPES)
    assert all(part.offset % 64 == 0 for part in parts) and buffer.nbytes % 64 == 0
    assert buffer.data_ptr() % 64 == 0
    words = buffer[:32].view(torch.int64).tolist()
    assert words == [len(parts), int(TYPES[parts[0].format]), parts[0].rows, parts[0].offset]
    assert torch.equal(dense_blocks(buffer, WIDTH), numbers)
    packed = blocks_linear(buffer, WIDTH, dtype=torch.bfloat16)
    assert packed.formats == tuple(TYPES) and packed.out_features == len(numbers)
    assert torch.equal(packed.dense(), numbers) and packed.dense().dtype is torch.float32
    assert packed.nbytes == buffer.nbytes
    assert numbers.numel() <= count_elements(buffer) < 1.2 * numbers.numel()


def test_rows_are_looked_up_in_any_part() -> None:
    buffer, numbers = mixture()
    ids = torch.tensor([len(numbers) - 1, 0, 7, 7, 3])
    assert torch.equal(lookup(buffer, WIDTH, ids), numbers[ids])
    packed = blocks_linear(buffer, WIDTH, dtype=torch.bfloat16)
    for ops in (OpTable.reference(), OpTable.stock("cpu", torch.bfloat16)):
        for count in (1, 5):
            found = ops.embedding(ids[:1].expand(count), packed)
            assert torch.equal(found.bfloat16(), numbers[ids[:1].expand(count)].bfloat16())
    found = embedding_float32(ids, packed)
    assert found.dtype is torch.float32 and torch.equal(found, numbers[ids])


def test_a_buffer_that_is_not_what_is_needed_is_told() -> None:
    parts, size = lay_out([("q8_0", 4), ("q4_0", 2)], 64)
    sound = torch.zeros(size, dtype=torch.uint8)
    start = torch.frombuffer(bytearray(header(parts)), dtype=torch.uint8)
    sound[: len(start)] = start
    assert check_buffer(sound, [4, 2], 64) == ""
    words = sound.clone().view(torch.int64)

    def damaged(place: int, value: int) -> str:
        changed = words.clone()
        changed[place] = value
        buffer = changed.view(torch.uint8)
        count_elements(buffer)  # both are told before the check, and must survive anything
        buffer_formats(buffer)
        return check_buffer(buffer, [4, 2], 64)

    assert "parts" in damaged(0, 1 << 40) and "parts" in damaged(0, -1) and "parts" in damaged(0, 1)
    assert "format 6" in damaged(1, 6) and "format" in damaged(4, 1 << 50)
    assert "rows" in damaged(2, 5) and "rows" in damaged(5, -2)
    assert "starts at" in damaged(3, 8) and "starts at" in damaged(6, 1)
    assert "end at" in damaged(6, 1 << 40) and "starts at" in damaged(6, -64)
    assert "rows" in check_buffer(sound, [4, 3], 64) and "blocks of" in check_buffer(sound, [4, 2], 48)
    assert check_buffer(sound[:4], [4, 2], 64) and check_buffer(sound[8:], [4, 2], 64)
    assert check_buffer(sound[: parts[1].offset], [4, 2], 64)


def test_rounding_to_eight_bits_is_to_the_nearest_step() -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3, 32:64] = 0
    weight[4, :32] = 1e-30
    buffer = join_blocks([("q8_0", quantize_blocks(weight))], 96)
    groups = weight.float().view(70, 3, 32)
    step = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    got = dense_blocks(buffer, 96).view(70, 3, 32)
    assert bool(((got - groups).abs() <= step * 0.5001 + 1e-30).all())
    assert not bool(got[3, 1].any()) and not bool(got[4, 0].any())
    # what is on the grid stays
    again = join_blocks([("q8_0", quantize_blocks(dense_blocks(buffer, 96)))], 96)
    assert (dense_blocks(again, 96) - dense_blocks(buffer, 96)).abs().max() <= step.max() / 1000


def test_q5_0_becomes_q8_0_without_loss() -> None:
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (5000, BLOCK_SIZES[TensorType.Q5_0][1]), np.uint8)
    blocks[:, 1] &= 0x3F  # no infinities
    kept = q8_0_of_q5_0(blocks)
    assert np.array_equal(
        dequantize(kept.reshape(-1), TensorType.Q8_0), dequantize(blocks.reshape(-1), TensorType.Q5_0)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", ["bfloat16", "float32", "int8", "reference"])
@pytest.mark.parametrize("bias", [False, True])
def test_stock_operators_take_blocks(table: str, dtype: torch.dtype, bias: bool) -> None:
    ops = {
        "bfloat16": lambda: OpTable.stock("cpu", torch.bfloat16),
        "float32": lambda: OpTable.stock("cpu", torch.float32),
        "int8": lambda: OpTable.stock("cpu", torch.bfloat16, "int8"),
        "reference": OpTable.reference,
    }[table]()
    buffer, numbers = mixture()
    added = torch.randn(len(numbers)).to(dtype) if bias else None
    packed = blocks_linear(buffer, WIDTH, added, dtype=torch.bfloat16)
    wide = numbers.double()
    for rows in (1, 4, 5, 40):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = x.double() @ wide.T + (0 if added is None else added.double())
        out = ops.linear(x, packed)
        assert out.dtype is dtype
        tolerance = (1e-5 if dtype is torch.float32 else 2e-2) * expected.abs().max()
        assert (out.double() - expected).abs().max() < tolerance
        logits = ops.logits_head(x, packed)
        assert logits.dtype is torch.float32 and (logits.double() - expected).abs().max() < tolerance
        if len(numbers) % 2 == 0:
            gate, up = expected.chunk(2, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
            got = ops.gated_linear(x, packed, "silu")
            assert (got.double() - wanted).abs().max() < 3e-2 * wanted.abs().max() + tolerance


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_float32_residual_stream_runs_on_weights_of_any_form(quantization: str) -> None:
    """Any number of rows, where stock by itself computes those of many in bfloat16."""
    ops = OpTable.stock("cpu", torch.bfloat16, quantization)
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(3)).mul_(0.1).bfloat16()
    added = torch.randn(96, generator=torch.Generator().manual_seed(4)).bfloat16()
    mapped = PackedLinear("parts", 64, 96, None, added, parts=(weight[:32], weight[32:]), dtype=weight.dtype)
    for packed in (ops.pack_linear(weight, added), mapped):
        for rows in (1, 5, 40):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
            residual = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows + 1))
            expected = x.double() @ weight.double().T + added.double() + residual.double()
            out = ops.linear(x, packed, residual)
            assert out.dtype is torch.float32
            assert (out.double() - expected).abs().max() < 2e-2 * expected.abs().max()


def test_many_rows_become_numbers_in_inference_mode() -> None:
    """Several threads write then, and each has a mode of its own."""
    weight = torch.randn(6000, 576)
    buffer = join_blocks([("q8_0", quantize_blocks(weight))], 576)
    with torch.inference_mode():
        dense = dense_blocks(buffer, 576)
    assert torch.equal(dense, dense_blocks(buffer, 576))
