"""Whole blocks out of a cache and into another: every layer, every head, to the last bit."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.engine.block_io import BlockIO
from headrace.kernels.cache import LayerKV

SHAPES = {
    "joint": [(2, 8, 8)] * 3,
    "apart": [(2, 8, 6)] * 2,
    "mixed": [(2, 8, 8), (4, 4, 4), (1, 24, 16)],
}


def make_cache(shapes: list[tuple[int, int, int]], dtype: torch.dtype, *, filled: bool) -> list[LayerKV]:
    torch.manual_seed(1)
    layers = [LayerKV.allocate(6, 4, heads, dim, v_dim, dtype) for heads, dim, v_dim in shapes]
    for layer in layers:
        if filled:
            layer.keys.normal_()
            layer.values.normal_()
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_blocks_arrive_as_they_were_and_touch_no_other(
    shapes: list[tuple[int, int, int]], direct: bool, dtype: torch.dtype
) -> None:
    source, target = make_cache(shapes, dtype, filled=True), make_cache(shapes, dtype, filled=False)
    out, into = BlockIO(source, direct=direct), BlockIO(target, direct=direct)
    assert BlockIO(source).read([3]) == out.read([3])
    assert out.block_bytes == sum(LayerKV.bytes_per_block(4, *shape, dtype) for shape in shapes)
    payloads = out.read([5, 0, 2])
    assert [len(payload) for payload in payloads] == [out.block_bytes] * 3
    for block, payload in zip([1, 4, 3], payloads, strict=True):
        into.write(block, bytes(payload))
    for ours, theirs in zip(target, source, strict=True):
        for mine, their in ((ours.key_blocks, theirs.key_blocks), (ours.value_blocks, theirs.value_blocks)):
            assert torch.equal(mine[:, [1, 4, 3]], their[:, [5, 0, 2]])
            assert not mine[:, [0, 2, 5]].any()


def test_keys_come_before_values_layer_by_layer() -> None:
    """The order that another replica, or a file, relies on."""
    (layer,) = make_cache([(2, 3, 3)], torch.float32, filled=True)
    (payload,) = BlockIO([layer]).read([2])
    found = torch.frombuffer(payload, dtype=torch.float32)
    assert torch.equal(
        found, torch.cat([layer.key_blocks[:, 2].flatten(), layer.value_blocks[:, 2].flatten()])
    )


def test_a_block_of_another_size_is_no_block() -> None:
    io = BlockIO(make_cache([(2, 3, 3)], torch.float32, filled=False))
    with pytest.raises(AssertionError):
        io.write(0, bytes(io.block_bytes - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(
    shapes: list[tuple[int, int, int]], dtype: torch.dtype, value: float
) -> None:
    layers = make_cache(shapes, dtype, filled=True)
    io = BlockIO(layers)
    assert io.is_finite(io.read([3])[0])
    for layer in layers:
        for part in (layer.keys, layer.values):
            slot = part[-1, 3 * 4 + 3]  # the last head's, in the last slot of block 3
            before = slot[-1].item()
            slot[-1] = value
            assert not io.is_finite(io.read([3])[0]) and io.is_finite(io.read([2])[0])
            slot[-1] = before
