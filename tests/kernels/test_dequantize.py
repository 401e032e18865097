from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
import torch

from headrace.kernels.block_layout import BLOCK_SIZES, TensorType
from headrace.kernels.dequantize import PIECE_ELEMENTS, dequantize, to_bfloat16

# Where a block keeps its float16 scales.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
EXTREMES = [0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, np.inf, -np.inf, np.nan]


def reference(data: np.ndarray, kind: TensorType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data[None], gguf.GGMLQuantizationType(int(kind))).reshape(-1)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    nans = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nans)
    np.testing.assert_array_equal(ours[~nans].view(np.uint32), theirs[~nans].view(np.uint32))


def test_types_and_block_sizes_are_those_of_ggml() -> None:
    for kind in TensorType:
        theirs = gguf.GGMLQuantizationType(int(kind))
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == BLOCK_SIZES[kind]


@pytest.mark.parametrize("kind", TensorType, ids=lambda kind: kind.name)
def test_random_blocks_equal_the_gguf_package_bit_for_bit(kind: TensorType) -> None:
    elements, block_bytes = BLOCK_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    # A little more than two pieces, so that the last one is ragged.
    blocks = (2 * PIECE_ELEMENTS + 5 * 256) // elements
    data = rng.integers(0, 256, blocks * block_bytes, dtype=np.uint8)
    assert_same_bits(dequantize(data, kind), reference(data, kind))


@pytest.mark.parametrize("name", SCALES)
def test_extreme_scales_equal_the_gguf_package_bit_for_bit(name: str) -> None:
    kind = TensorType[name]
    block_bytes = BLOCK_SIZES[kind][1]
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (len(EXTREMES) ** 2, block_bytes), dtype=np.uint8)
    pairs = np.array(np.meshgrid(EXTREMES, EXTREMES), np.float16).reshape(2, -1)
    for place, values in zip(SCALES[name], pairs, strict=False):
        data[:, place : place + 2] = values[:, None].view(np.uint8)
    assert_same_bits(dequantize(data.reshape(-1), kind), reference(data.reshape(-1), kind))


@pytest.mark.parametrize(
    ("name", "limit"), [("Q8_0", 0.03), ("Q5_0", 0.3), ("Q5_1", 0.3), ("Q4_0", 0.6), ("Q4_1", 0.6)]
)
def test_quantized_numbers_come_back_near(name: str, limit: float) -> None:
    values = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    error = np.abs(dequantize(packed.reshape(-1), TensorType[name]) - values.reshape(-1))
    assert 0 < error.max() < limit


def test_bfloat16_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, PIECE_ELEMENTS + 1000, dtype=np.uint64).astype(np.uint32)
    ties = np.array(
        [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x00000001]
    )
    values = np.concatenate([bits, ties.astype(np.uint32)]).view(np.float32)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nans = np.isnan(values)
    ours = to_bfloat16(values.copy())
    np.testing.assert_array_equal(ours[~nans], theirs[~nans])
    back = torch.from_numpy(ours.view(np.int16)).view(torch.bfloat16)
    assert back.isnan().numpy().tolist() == nans.tolist()


@pytest.mark.parametrize(
    "kind", [TensorType.Q4_K, TensorType.Q6_K, TensorType.Q5_0], ids=lambda kind: kind.name
)
def test_memory_is_the_result_and_little_more(kind: TensorType) -> None:
    elements, block_bytes = BLOCK_SIZES[kind]
    data = np.zeros((4 << 20) // elements * block_bytes, np.uint8)
    tracemalloc.start()
    try:
        dequantize(data, kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * (4 << 20) + (3 << 20)
