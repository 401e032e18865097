"""A step's layers one after another: only pointers change between them, and nothing may show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.packs import KernelEntry
from headrace.kernels.native.op import make_op
from headrace.kernels.native.store import WeightStore
from headrace.kernels.table import OpTable
from tests.kernels.native.conftest import GetKernel
from tests.kernels.native.layers import DECODES, HIDDEN, MIXED, Step, make_weights

REFERENCE = OpTable.reference()


class Chain:
    """Two layers' ops, run as a model runs them; ``fell_through`` counts what the kernel was not asked."""

    def __init__(self, get_kernel: GetKernel, **conditions: Any) -> None:
        self.fell_through = 0
        entry = {"phases": ["decode", "prefill"], "max_rows": 0, "weight_formats": ["float32"]}
        self.weights = make_weights("llama", torch.float32)

        def fallback(*arguments: Any) -> Tensor:
            self.fell_through += 1
            return REFERENCE.unbound("decoder_layer")(*arguments)

        made = KernelEntry(op="decoder_layer", source="x.cpp", **(entry | conditions))
        op = make_op(get_kernel("decoder_layer"), made, fallback)
        op.prepare(self.weights, WeightStore())
        self.ours = REFERENCE.replace(decoder_layer=op)

    def run(self, step: Step, ops: OpTable | None = None, layers: str = "0101") -> list[Tensor]:
        """What each layer gives."""
        ops, x, given = ops or self.ours, step.x, []
        for name in layers:
            x = ops.decoder_layer(x, self.weights.layers[int(name)], step.cos, step.sin, step.kv, step.batch)
            given.append(x)
        return given


def step_of(entries: tuple[tuple[int, int], ...], seed: int = 5) -> Step:
    return Step.random(entries, torch.float32, 16, seed)


def assert_near(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() < 1e-4 * other.abs().max()


def test_steps_of_changing_sizes(kernel: GetKernel) -> None:
    chain = Chain(kernel)
    with torch.inference_mode():
        for entries in (DECODES, MIXED, DECODES, ((5, 1),), ((9, 1),), ((0, 70),), DECODES):
            got = chain.run(step_of(entries))
            assert_near(got, chain.run(step_of(entries), REFERENCE))
    assert chain.fell_through == 0


def test_what_somebody_holds_is_not_written_again(kernel: GetKernel) -> None:
    chain = Chain(kernel)
    with torch.inference_mode():
        held = []
        for seed in (1, 2, 3):
            given = chain.run(step_of(DECODES, seed), layers="010101010101")
            held.append((given, [x.clone() for x in given]))
        for given, copies in held:
            assert all(torch.equal(x, copy) for x, copy in zip(given, copies, strict=True))
            assert len({x.data_ptr() for x in given}) == len(given)
        del held, given, copies
        x, addresses = None, set()
        for seed in range(20):  # and what nobody holds is
            x = chain.run(step_of(DECODES, seed))[-1]
            addresses.add(x.data_ptr())
        assert len(addresses) < 10


@pytest.mark.parametrize("change", ["x", "angles", "batch"])
def test_a_call_that_does_not_follow_is_laid_out_anew(kernel: GetKernel, change: str) -> None:
    chain, step, other = Chain(kernel), step_of(DECODES), step_of(DECODES, 6)
    first, second = chain.weights.layers
    with torch.inference_mode():
        for ops in (chain.ours, REFERENCE):
            kv = step_of(DECODES).kv
            x = ops.decoder_layer(step.x, first, step.cos, step.sin, kv, step.batch)
            if change == "x":
                x = x + other.x
            cos, sin = (other.cos, other.sin) if change == "angles" else (step.cos, step.sin)
            batch = other.batch if change == "batch" else step.batch
            y = ops.decoder_layer(x, second, cos, sin, kv, batch)
            z = ops.decoder_layer(y, first, step.cos, step.sin, kv, batch)
            if ops is chain.ours:
                ours = [x, y, z]
        assert_near(ours, [x, y, z])
    assert z.shape == (len(DECODES), HIDDEN)


def test_what_is_not_covered_falls_through_in_the_middle_of_a_step(kernel: GetKernel) -> None:
    chain = Chain(kernel, phases=["decode"])
    with torch.inference_mode():
        for entries in (DECODES, MIXED, DECODES):
            assert_near(chain.run(step_of(entries)), chain.run(step_of(entries), REFERENCE))
    assert chain.fell_through == 4
