"""Stock attention against the reference in float64, over ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.attention import attention
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.cache import LayerKV
from headrace.kernels.plan import decode_plan
from tests.kernels.ragged import BLOCK_SIZE, Case, make_case, tables

# of the largest output; bfloat16 rounds to 2^-8, scores and weights once each
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = (torch.float32, torch.bfloat16)

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of one": {"window": 1},
    "window within a block": {"window": 11},
    "window shorter than the contexts": {"window": 100},
    "window longer than any context": {"window": 5000},
    "softcap": {"softcap": 20.0},
    "softcap and window": {"softcap": 20.0, "window": 64},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 64},
    "one key head": {"heads": 4, "kv_heads": 1, "head_dim": 64, "window": 48},
    "a key head for each": {"heads": 3, "kv_heads": 3, "head_dim": 80},
    "values narrower than keys": {"head_dim": 48, "v_head_dim": 16},
    "own scale": {"scale": 0.3},
    "heads of 96": {"head_dim": 96},
    "heads of 256": {"head_dim": 256, "heads": 2, "kv_heads": 1},
}


def run(case: Case) -> torch.Tensor:
    return attention(case.q, case.k, case.v, case.kv, case.batch, case.spec)


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_mixed_batch(rule: str, dtype: torch.dtype, consecutive: bool) -> None:
    case = make_case(dtype, consecutive=consecutive, **RULES[rule])
    case.check(run(case), TOLERANCE[dtype])


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [0, 5, 200, 900, 9000])
@pytest.mark.parametrize("rule", ["plain", "window shorter than the contexts", "softcap", "sinks"])
def test_lone_decode(rule: str, context: int, dtype: torch.dtype, consecutive: bool) -> None:
    case = make_case(dtype, entries=((context, 1),), consecutive=consecutive, **RULES[rule])
    # the more keys, the smaller the mean of their values, to which the error is relative
    case.check(run(case), TOLERANCE[dtype] * (1 + context / 2000))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_many_decodes_of_very_different_length(window: int | None, dtype: torch.dtype) -> None:
    entries = tuple((length, 1) for length in (3000, 5, 40, 1500, 0, 33, 900, 2999))
    case = make_case(dtype, entries=entries, window=window)
    case.check(run(case), TOLERANCE[dtype])


def test_lone_chunk_after_a_long_history() -> None:
    for consecutive in (True, False):
        case = make_case(torch.bfloat16, entries=((2500, 300),), consecutive=consecutive)
        case.check(run(case), TOLERANCE[torch.bfloat16])


def test_rows_wider_than_the_cache() -> None:
    """A step of few rows is float32 over a bfloat16 cache."""
    for entries in (((200, 1), (9, 1)), ((700, 1),), ((31, 3),)):
        case = make_case(torch.bfloat16, entries=entries, row_dtype=torch.float32)
        out = run(case)
        assert out.dtype is torch.float32
        case.check(out, TOLERANCE[torch.bfloat16])


def test_keys_and_values_from_different_tensors() -> None:
    case = make_case(torch.float32, one_projection=False)
    case.check(run(case), TOLERANCE[torch.float32])


def test_float32_rows_do_not_depend_on_chunks_or_company() -> None:
    whole = make_case(torch.float32, entries=((0, 200),), consecutive=True)
    expected = run(whole)
    kv = LayerKV.allocate(20, BLOCK_SIZE, 2, 32, dtype=torch.float32)
    made, _ = tables(((0, 200), (0, 90)), consecutive=False, seed=3)
    other = torch.randn(290, 6, 32, generator=torch.Generator().manual_seed(5))
    start = 0
    for size in (1, 7, 64, 99, 1, 28):
        entries = [
            type(entry)(start if index == 0 else 0, new, entry.block_table)
            for index, (entry, new) in enumerate(zip(made, (size, 90), strict=True))
        ]
        batch = AttentionBatch.build(entries, BLOCK_SIZE)
        mine = slice(start, start + size)
        q, k, v = (
            torch.cat((rows[mine], other[:90, : rows.shape[1]])) for rows in (whole.q, whole.k, whole.v)
        )
        out = attention(q, k, v, kv, batch, whole.spec)[:size]
        assert (out - expected[mine]).abs().max() < 1e-6 * expected.abs().max()
        start += size


def test_large_scores_keep_their_order() -> None:
    """Scores in the hundreds: the softmax neither overflows nor loses its maximum."""
    for dtype in DTYPES:
        case = make_case(dtype, entries=((300, 1), (200, 50)), scale=20.0)
        out = run(case)
        assert torch.isfinite(out).all()
        if dtype is torch.float32:
            case.check(out, 1e-3)


def test_decodes_are_grouped_by_length() -> None:
    entries, _ = tables(tuple((n, 1) for n in (3000, 40, 2900, 33)), consecutive=False)
    batch = AttentionBatch.build(entries, BLOCK_SIZE)
    groups = decode_plan(batch, None, torch.float32)
    assert sorted(tuple(group.rows.tolist()) for group in groups) == [(0, 2), (1, 3)]
    assert decode_plan(batch, None, torch.float32) is groups
    assert len(decode_plan(batch, 32, torch.float32)) == 1


def test_window_touches_only_its_blocks() -> None:
    """Blocks left of every window may hold anything, even NaN."""
    case = make_case(torch.float32, entries=((400, 1), (500, 1), (300, 60)), window=50)
    for table, first in zip(
        (
            case.batch.decode_block_tables[0],
            case.batch.decode_block_tables[1],
            case.batch.prefills[0].block_table,
        ),
        (400 + 1 - 50, 500 + 1 - 50, 300 + 1 - 50),
        strict=True,
    ):
        for block in table[: first // BLOCK_SIZE].tolist():
            for cache in (case.kv.keys, case.kv.values):
                cache[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = float("nan")
    error = (run(case).double() - case.expected).abs().max()
    assert error < 2e-6 * case.expected.abs().max()


def test_reference_agrees_with_torch() -> None:
    """The reference itself, against torch's attention for one plain sequence."""
    case = make_case(torch.float64, entries=((0, 70),))
    q, k, v = (rows.transpose(0, 1)[None] for rows in (case.q, case.k, case.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = reference.attention(case.q, case.k, case.v, case.kv, case.batch, case.spec)
    assert torch.allclose(out, expected[0].transpose(0, 1).flatten(1), atol=1e-12)


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_products_in_float32(rule: str, consecutive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that multiplies no bfloat16: at least as exact, in the same dtype."""
    monkeypatch.setattr("headrace.kernels.attention.WIDENS", True)
    for entries in (None, ((0, 1),), ((900, 1),), ((9000, 1),)):
        given = {} if entries is None else {"entries": entries}
        case = make_case(torch.bfloat16, consecutive=consecutive, **given, **RULES[rule])
        out = run(case)
        assert out.dtype is torch.bfloat16
        case.check(out, TOLERANCE[torch.bfloat16] * (1 if entries is None else 1 + entries[0][0] / 2000))
