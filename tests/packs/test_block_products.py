"""Products with GGUF's blocks of the CPU pack: nothing lost in packing, the arithmetic that their header
states to the last bit, and the same bits in every tile, thread count and layout."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.core.errors import CompilerMissingError
from headrace.kernels.block_layout import BLOCK_SIZES, TYPES
from headrace.kernels.blocks import dense_rows, join_blocks
from headrace.kernels.native.abi import ALIGNMENT, DTYPES, MAX_DIMS, HrTensor
from headrace.kernels.native.build import compile_command, find_compiler

Floats = NDArray[np.float32]

SHIM = Path(__file__).parent / "blocks_shim.cpp"
HEADERS = Path(__file__).parents[2] / "packs" / "cpu"
VARIANTS = {"native": [], "no byte dots": ["-mno-avx512vnni"], "avx2": ["-mno-avx512f", "-mno-avxvnni"]}
OFFSETS = {"q8_0": 128, "q4_0": 8, "q4_1": 0, "q4_k": 0, "q5_k": 0, "q6_k": 32}
FORMATS = list(OFFSETS)
WITH_MINIMA = ("q4_1", "q4_k", "q5_k")


class Weight:
    """A weight of blocks, in parts (format, blocks) of rows below rows, packed for a number of threads."""

    def __init__(
        self,
        shim: ctypes.CDLL,
        parts: list[tuple[str, torch.Tensor]],
        width: int,
        *,
        gated: bool = False,
        threads: int = 2,
    ) -> None:
        self._shim, self.gated, self.width = shim, gated, width
        self.dense = torch.cat([dense_rows(blocks, name) for name, blocks in parts]).numpy()
        buffer = join_blocks(parts, width)
        place = ctypes.c_int64 * MAX_DIMS
        shape = place(len(self.dense), width, *[0] * (MAX_DIMS - 2))
        tensor, absent = HrTensor(buffer.data_ptr(), DTYPES["blocks"], 2, shape, place()), HrTensor()
        arguments = ctypes.byref(tensor), ctypes.byref(absent), int(gated), threads
        self.size = shim.packed_bytes(*arguments)
        assert self.size > 0
        self._memory = np.zeros(self.size + ALIGNMENT, np.uint8)
        self._packed = ctypes.c_void_p(-(-self._memory.ctypes.data // ALIGNMENT) * ALIGNMENT)
        shim.pack(*arguments, self._packed)

    def times(self, x: Floats, *, threads: int = 2, piece: int | None = None) -> Floats:
        """The rows of ``x``, put into the operand ``piece`` values at a time, times the weight."""
        out = np.full((len(x), len(self.dense) // 2 if self.gated else len(self.dense)), np.nan, np.float32)
        x = np.ascontiguousarray(x)
        sizes = [ctypes.c_int64(value) for value in (len(x), piece or self.width, 0)]
        self._shim.multiply_rows(self._packed, threads, _pointer(x), *sizes, _pointer(out))
        return out

    def unpacked(self) -> tuple[NDArray[np.uint8], Floats, Floats]:
        """Of a weight of one part: values (out, in); scales and minima (out, in / 16)."""
        values = np.zeros(self.dense.shape, np.uint8)
        scales, minima = (np.zeros((len(self.dense), self.width // 16), np.float32) for _ in range(2))
        self._shim.unpack_blocks(self._packed, _pointer(values), _pointer(scales), _pointer(minima))
        return values, scales, minima


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


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
    library = tmp_path_factory.mktemp("blocks") / "shim.so"
    flags = ["-ffp-contract=off", "-O2", f"-I{HEADERS}", *flags]
    subprocess.run(compile_command(compiler, SHIM, library, flags), check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.packed_bytes.restype = ctypes.c_int64
    return loaded


# ---- blocks and rows to multiply ----

Scales = Callable[[np.random.Generator, int], NDArray[np.float16]]


def _ordinary(random: np.random.Generator, count: int) -> NDArray[np.float16]:
    numbers = random.uniform(0.5, 2, count) * random.choice([-1, 1], count) / 256
    halves: NDArray[np.float16] = numbers.astype(np.float16)
    return halves


def _extreme(random: np.random.Generator, count: int) -> NDArray[np.float16]:
    """Zeros of both signs, the least, subnormal and greatest numbers of float16, and any others."""
    some = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF], np.uint16)
    anything = random.integers(0, 0x7C00, count) | random.choice([0, 0x8000], count)
    bits = np.where(random.random(count) < 0.7, random.choice(some, count), anything)
    numbers: NDArray[np.float16] = bits.astype(np.uint16).view(np.float16)
    return numbers


def _blocks(name: str, rows: int, width: int, *, seed: int = 0, scales: Scales = _ordinary) -> torch.Tensor:
    """Blocks (rows, bytes of a row) of random bytes, which may be anything but for their float16 numbers."""
    random = np.random.default_rng(seed)
    elements, size = BLOCK_SIZES[TYPES[name]]
    count = rows * width // elements
    raw = random.integers(0, 256, (count, size)).astype(np.uint8)
    places = {"q6_k": [208]}.get(name, [0, 2] if name in WITH_MINIMA else [0])
    for place in places:
        raw[:, place : place + 2] = scales(random, count).reshape(-1, 1).view(np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1))


def _width(name: str, groups: int) -> int:
    return 32 * groups if BLOCK_SIZES[TYPES[name]][0] == 32 else 256 * -(-groups // 8)


def _rows(rows: int, n: int, seed: int = 1) -> Floats:
    random = np.random.default_rng(seed)
    x: Floats = (random.standard_normal((rows, n)) * np.exp2(random.integers(-20, 20, (rows, 1)))).astype(
        np.float32
    )
    x[:, 32:64] *= 1000
    return x


def _steps(x: Floats) -> tuple[Floats, Floats]:
    """(rows, n) → whole numbers (rows, n) and a scale for each 32."""
    groups = x.reshape(len(x), -1, 32)
    scale = np.abs(groups).max(axis=2) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scale[..., None] != 0, groups / scale[..., None], 0)
    return np.clip(np.rint(steps), -127, 127).reshape(x.shape), scale


def _fma(a: Floats, b: Floats, c: Floats) -> Floats:
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def _stated(weight: Weight, name: str, x: Floats) -> Floats:
    """The arithmetic that product_blocks.h states."""
    values, scales, minima = weight.unpacked()
    steps, row_scales = _steps(x)
    centred = values.astype(np.float64) - OFFSETS[name]
    size = 16 if name == "q6_k" else 32
    out = np.zeros((len(x), len(centred)), np.float32)
    for at in range(0, x.shape[1], size):
        dot = steps[:, at : at + size].astype(np.float64) @ centred[:, at : at + size].T
        row_scale = row_scales[:, at // 32, None]
        out = _fma(dot.astype(np.float32), scales[None, :, at // 16] * row_scale, out)
        if name in WITH_MINIMA:
            total = row_scale * steps[:, at : at + 32].sum(axis=1, dtype=np.float32)[:, None]
            out = _fma(
                np.broadcast_to(minima[None, :, at // 16], out.shape), np.broadcast_to(total, out.shape), out
            )
    return out


# ---- tests ----


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scales", [_ordinary, _extreme])
def test_what_is_packed_is_what_the_blocks_say(shim: ctypes.CDLL, name: str, scales: Scales) -> None:
    for rows, groups in ((1, 1), (31, 3), (96, 24)):
        width = _width(name, groups)
        weight = Weight(shim, [(name, _blocks(name, rows, width, scales=scales))], width)
        values, scale, minimum = weight.unpacked()
        numbers = (values.astype(np.float32) - OFFSETS[name]) * scale.repeat(16, 1) + minimum.repeat(16, 1)
        assert (numbers == weight.dense).all()


@pytest.mark.parametrize(
    ("name", "bits"),
    [("q8_0", 8.5), ("q4_0", 4.5), ("q4_1", 5), ("q4_k", 4.625), ("q5_k", 5.625), ("q6_k", 6.5625)],
)
def test_a_packed_weight_is_about_as_large_as_its_blocks(shim: ctypes.CDLL, name: str, bits: float) -> None:
    weight = Weight(shim, [(name, _blocks(name, 4096, 1024))], 1024)
    assert weight.size * 8 < 1.005 * bits * weight.dense.size


def test_a_row_is_rounded_to_the_nearest_steps(shim: ctypes.CDLL) -> None:
    x = _rows(40, 256)
    x[1, 64:96] = 0
    x[2] *= np.float32(2.0**-120)  # scales below the least normal number
    x[3] = np.float32(2.0**-149) * np.arange(256)
    x[4] = np.arange(-128, 128) + np.float32(0.5)  # ties
    x[4, ::32] = 127
    for row in x:
        values, scales = np.zeros(256, np.int8), np.zeros(8, np.float32)
        shim.quantize_row(_pointer(row), ctypes.c_int64(256), _pointer(values), _pointer(scales))
        steps, expected = _steps(row[None])
        assert (values == steps[0]).all()
        assert (scales == expected[0]).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scales", [_ordinary, _extreme])
def test_a_product_is_the_stated_arithmetic(shim: ctypes.CDLL, name: str, scales: Scales) -> None:
    for outputs, groups in ((1, 1), (48, 3), (80, 18)):
        width = _width(name, groups)
        weight = Weight(shim, [(name, _blocks(name, outputs, width, scales=scales))], width)
        for rows in (1, 2, 7, 8, 13, 16, 21):
            x = _rows(rows, width, seed=rows)
            assert (weight.times(x) == _stated(weight, name, x)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_off_by_the_rounding_of_its_rows(shim: ctypes.CDLL, name: str) -> None:
    width = _width(name, 24)
    weight = Weight(shim, [(name, _blocks(name, 96, width))], width)
    x = _rows(20, width)
    exact = weight.dense.astype(np.float64)
    half_steps = 0.5001 * _steps(x)[1].astype(np.float64).repeat(32, 1)
    bound = half_steps @ np.abs(exact).T + 2.0**-20 * (np.abs(x) @ np.abs(exact).T)
    assert (np.abs(weight.times(x) - x @ exact.T) <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_in_every_tile_and_on_any_threads(
    shim: ctypes.CDLL, name: str, gated: bool
) -> None:
    width = _width(name, 18)
    parts = [(name, _blocks(name, 320, width))]
    x = _rows(130, width)
    alone = Weight(shim, parts, width, gated=gated, threads=1)
    expected = np.concatenate([alone.times(row[None], threads=1) for row in x])
    for packed_for in (1, 2, 3):
        weight = Weight(shim, parts, width, gated=gated, threads=packed_for)
        for rows in (*range(1, 18), 40, 130):
            for threads in (1, 2, 3):
                assert (weight.times(x[-rows:], threads=threads) == expected[-rows:]).all(), (
                    packed_for,
                    rows,
                    threads,
                )


def test_parts_of_several_formats_are_one_weight(shim: ctypes.CDLL) -> None:
    parts = [
        ("q4_k", _blocks("q4_k", 96, 512)),
        ("q6_k", _blocks("q6_k", 40, 512)),
        ("q8_0", _blocks("q8_0", 64, 512)),
    ]
    weight = Weight(shim, parts, 512)
    for rows in (1, 5, 33):
        x = _rows(rows, 512)
        expected = np.concatenate([Weight(shim, [part], 512).times(x) for part in parts], axis=1)
        assert (weight.times(x) == expected).all()


def test_halves_of_two_formats_are_one_gated_weight(shim: ctypes.CDLL) -> None:
    halves = [("q4_k", _blocks("q4_k", 96, 256)), ("q6_k", _blocks("q6_k", 96, 256))]
    weight = Weight(shim, halves, 256, gated=True)
    for rows in (1, 5, 33):
        x = _rows(rows, 256)
        x /= np.abs(x).max(axis=1, keepdims=True)
        gate, up = (Weight(shim, [half], 256).times(x).astype(np.float64) for half in halves)
        np.testing.assert_allclose(weight.times(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_pieces_are_the_rows(shim: ctypes.CDLL, name: str) -> None:
    weight = Weight(shim, [(name, _blocks(name, 64, 512))], 512)
    x = _rows(9, 512)
    for piece in (32, 64, 96):
        assert (weight.times(x, piece=piece) == weight.times(x)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_a_number_stays_in_its_row(shim: ctypes.CDLL, name: str) -> None:
    weight = Weight(shim, [(name, _blocks(name, 64, 256))], 256)
    x = _rows(30, 256)
    finite = weight.times(x)
    x[3, 5], x[20, 7] = np.nan, np.inf
    out = weight.times(x)
    others = [row for row in range(30) if row not in (3, 20)]
    assert np.isnan(out[3]).all()
    assert not np.isfinite(out[20]).any()
    assert (out[others] == finite[others]).all()
