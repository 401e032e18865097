"""A block's identity changes with everything that changes its keys and values, and with nothing else."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.identity import ID_BYTES, block_identities, root_identity, split_identities

ROOT: dict[str, Any] = {
    "model_revision": "r",
    "kv_dtype": "bfloat16",
    "kv_layout": "hnd",
    "block_size": 4,
}
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(1, 8), st.integers(0, 10))
def test_a_chain_can_be_continued_anywhere(ids: list[int], block_size: int, start: int) -> None:
    root = root_identity(**ROOT)
    whole = block_identities(root, array("I", ids), block_size)
    assert len(whole) == len(ids) // block_size
    start = min(start, len(whole))
    parent = whole[start - 1] if start else root
    assert block_identities(parent, array("I", ids), block_size, start_block=start) == whole[start:]
    assert split_identities(b"".join(whole)) == whole


@given(tokens, tokens)
def test_identities_agree_exactly_on_the_shared_blocks(left: list[int], right: list[int]) -> None:
    root = root_identity(**ROOT)
    ours, theirs = (block_identities(root, array("I", ids), 4) for ids in (left, right))
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        assert (mine == other) == (left[: 4 * index + 4] == right[: 4 * index + 4])


@pytest.mark.parametrize(
    "change",
    [
        {"model_revision": "s"},
        {"kv_dtype": "float32"},
        {"kv_layout": "nhd"},
        {"block_size": 8},
        {"adapter": "a"},
        {"weights_digest": "w"},
        {"tenant_salt": "t"},
    ],
)
def test_the_root_separates_what_must_not_be_shared(change: dict[str, Any]) -> None:
    assert root_identity(**{**ROOT, **change}) != root_identity(**ROOT)
    assert len(root_identity(**ROOT)) == ID_BYTES
