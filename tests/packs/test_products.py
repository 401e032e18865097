"""Products with bf16 weights of the CPU pack: right to what their arithmetic allows, and the same bits in
every tile, thread count and layout."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.core.errors import CompilerMissingError
from headrace.kernels.native.abi import ALIGNMENT, DTYPES, MAX_DIMS, HrTensor
from headrace.kernels.native.build import compile_command, find_compiler

Floats = NDArray[np.float32]

SHIM = Path(__file__).parent / "products_shim.cpp"
HEADERS = Path(__file__).parents[2] / "packs" / "cpu"
VARIANTS = {"native": [], "no bf16 dots": ["-mno-avx512bf16"], "avx2": ["-mno-avx512f"]}

UNIT_ROUNDOFF = 2.0**-24
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
STEEPEST = 1.2
"""No activation's slope is above it."""


class Weight:
    """A bf16 weight, packed for a number of threads, with the numbers it stands for."""

    def __init__(
        self,
        shim: ctypes.CDLL,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
        parts: int = 2,
    ) -> None:
        self._shim, self.gated = shim, gated
        self.exact = weight.double().numpy()
        self.bias = np.zeros(len(weight)) if bias is None else bias.double().numpy()
        tensors = _tensor(weight), _tensor(bias)
        arguments = ctypes.byref(tensors[0]), ctypes.byref(tensors[1]), int(gated), parts
        size = shim.packed_bytes(*arguments)
        assert size > 0
        self._memory = np.zeros(size + ALIGNMENT, np.uint8)
        self._packed = -(-self._memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        shim.pack(*arguments, ctypes.c_void_p(self._packed))

    def times(
        self, x: Floats, *, threads: int = 2, activation: str = "silu", piece: int | None = None
    ) -> Floats:
        """The rows of ``x``, put into the operand ``piece`` values at a time, times the weight."""
        outputs = len(self.exact) // 2 if self.gated else len(self.exact)
        out = np.full((len(x), outputs), np.nan, np.float32)
        x = np.ascontiguousarray(x)
        self._shim.multiply_rows(
            ctypes.c_void_p(self._packed),
            threads,
            ctypes.c_void_p(x.ctypes.data),
            ctypes.c_int64(len(x)),
            ctypes.c_int64(piece or x.shape[1]),
            ctypes.c_int64(ACTIVATIONS[activation]),
            ctypes.c_void_p(out.ctypes.data),
        )
        return out

    def expected(self, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Before an activation: in float64 on x rounded to bf16, and how far a sum may be from it.

        An output is one chain of ``in`` additions of exact products: off by at most ``in`` roundings of
        numbers that the sum of sizes bounds. A bias adds one.
        """
        rounded = torch.from_numpy(x).bfloat16().double().numpy()
        sizes = np.abs(rounded) @ np.abs(self.exact).T + np.abs(self.bias)
        return rounded @ self.exact.T + self.bias, 1.01 * UNIT_ROUNDOFF * (x.shape[1] + 2) * sizes


def _tensor(tensor: torch.Tensor | None) -> HrTensor:
    if tensor is None:
        return HrTensor()
    fill = [0] * (MAX_DIMS - tensor.ndim)
    place = ctypes.c_int64 * MAX_DIMS
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    return HrTensor(
        tensor.data_ptr(), dtype, tensor.ndim, place(*tensor.shape, *fill), place(*tensor.stride(), *fill)
    )


@pytest.fixture(scope="module", params=VARIANTS)
def shim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The products compiled for this CPU, and as for lesser ones."""
    flags = VARIANTS[request.param]
    if flags and platform.machine() != "x86_64":
        pytest.skip("vectors of another width are an x86 matter")
    try:
        compiler = find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))
    library = tmp_path_factory.mktemp("products") / "shim.so"
    flags = ["-ffp-contract=off", "-DHR_WITHOUT_BLOCKS", f"-I{HEADERS}", *flags]
    subprocess.run(compile_command(compiler, SHIM, library, flags), check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.packed_bytes.restype = ctypes.c_int64
    return loaded


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rows(rows: int, n: int, seed: int = 1) -> Floats:
    array: Floats = _normal(rows, n, seed=seed).numpy()
    return array


SHAPES = [(1, 1), (15, 7), (33, 17), (48, 64), (96, 576), (320, 200), (64, 1536)]
ROWS = [1, 2, 3, 5, 8, 14, 15, 16, 17, 40]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_as_exact_as_its_sums(
    shim: ctypes.CDLL, outputs: int, inputs: int, biased: bool
) -> None:
    bias = _normal(outputs, seed=2) if biased else None
    weight = Weight(shim, _normal(outputs, inputs).bfloat16(), bias)
    for rows in ROWS:
        x = _rows(rows, inputs, seed=rows)
        expected, bound = weight.expected(x)
        assert (np.abs(weight.times(x) - expected) <= bound).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("half", [1, 24, 160])
def test_a_gated_product_is_as_exact_as_its_sums(
    shim: ctypes.CDLL, activation: str, biased: bool, half: int
) -> None:
    bias = _normal(2 * half, seed=2).bfloat16() if biased else None
    weight = Weight(shim, _normal(2 * half, 72).bfloat16() / 4, bias, gated=True)
    for rows in ROWS:
        x = _rows(rows, 72, seed=rows)
        sums, bound = weight.expected(x)
        activated = _activate(sums[:, :half], activation)
        up = sums[:, half:]
        # the sums' own errors, what the activation makes of them, the activation's and the product's rounding
        slack = (
            STEEPEST * bound[:, :half] * (np.abs(up) + bound[:, half:]) + np.abs(activated) * bound[:, half:]
        )
        slack += 32 * UNIT_ROUNDOFF * np.abs(sums[:, :half] * up)
        assert (np.abs(weight.times(x, activation=activation) - activated * up) <= slack).all()


def _activate(x: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    tensor = torch.from_numpy(x)
    if kind == "silu":
        result = torch.nn.functional.silu(tensor)
    else:
        result = torch.nn.functional.gelu(tensor, approximate="tanh" if kind == "gelu_tanh" else "none")
    array: NDArray[np.float64] = result.numpy()
    return array


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 576), (1056, 130)])
def test_a_row_has_the_same_bits_in_every_tile_and_on_any_threads(
    shim: ctypes.CDLL, outputs: int, inputs: int, gated: bool
) -> None:
    tensor = _normal(outputs, inputs).bfloat16()
    x = _rows(513, inputs)
    alone = Weight(shim, tensor, None, gated=gated, parts=1)
    expected = np.concatenate([alone.times(row[None], threads=1) for row in x])
    for parts, threads in ((1, 1), (2, 2), (3, 3), (5, 5), (2, 3), (5, 2)):
        weight = Weight(shim, tensor, None, gated=gated, parts=parts)
        for rows in (*range(1, 18), 64, 100, 513):
            assert (weight.times(x[-rows:], threads=threads) == expected[-rows:]).all(), (
                parts,
                rows,
                threads,
            )


def test_rows_in_pieces_are_the_rows(shim: ctypes.CDLL) -> None:
    weight = Weight(shim, _normal(64, 83).bfloat16(), None)
    x = _rows(9, 83)
    for piece in (16, 32, 48):
        assert (weight.times(x, piece=piece) == weight.times(x)).all()


def test_what_is_not_a_number_stays_in_its_row(shim: ctypes.CDLL) -> None:
    weight = Weight(shim, _normal(64, 80).bfloat16(), None)
    x = _rows(30, 80)
    finite = weight.times(x)
    x[3, 5], x[20, 7] = np.nan, np.inf
    out = weight.times(x)
    others = [row for row in range(30) if row not in (3, 20)]
    assert np.isnan(out[3]).all()
    assert not np.isfinite(out[20]).any()
    assert (out[others] == finite[others]).all()


def test_a_weight_whose_rows_are_apart_is_read_where_it_lies(shim: ctypes.CDLL) -> None:
    wide = _normal(64, 160).bfloat16()
    x = _rows(3, 80)
    apart = Weight(shim, wide[:, 40:120], None)
    dense = Weight(shim, wide[:, 40:120].contiguous(), None)
    assert (apart.times(x) == dense.times(x)).all()


def test_other_weights_are_not_covered(shim: ctypes.CDLL) -> None:
    absent = _tensor(None)
    for tensor, gated in ((_normal(4, 8), 0), (_normal(4, 8).bfloat16().T, 0), (_normal(5, 8).bfloat16(), 1)):
        weight = _tensor(tensor)
        assert shim.packed_bytes(ctypes.byref(weight), ctypes.byref(absent), gated, 1) == 0
