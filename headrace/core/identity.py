"""Block identity: a SHA-256 chain over the token ids of each block.

    root ──► id₀ = H(root ‖ tokens[0:B]) ──► id₁ = H(id₀ ‖ tokens[B:2B]) ──► …

The root names whatever else makes keys and values differ, so two replicas agree on an identity exactly
when their cached blocks are interchangeable.
"""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TypeAlias

ID_BYTES = 32
Tokens: TypeAlias = "bytes | bytearray | memoryview | array[int]"


def root_identity(
    *,
    model_revision: str,
    kv_dtype: str,
    kv_layout: str,
    block_size: int,
    adapter: str = "",
    weights_digest: str = "",
    tenant_salt: str = "",
) -> bytes:
    """The chain's root: 32 bytes that change with anything that changes keys and values."""
    parts = (
        model_revision,
        weights_digest,
        adapter,
        kv_dtype,
        kv_layout,
        str(block_size),
        tenant_salt,
    )
    return sha256("\x1f".join(parts).encode()).digest()


def block_identities(parent: bytes, tokens: Tokens, block_size: int, *, start_block: int = 0) -> list[bytes]:
    """Identities of the full blocks of ``tokens`` from ``start_block`` on.

    ``tokens`` is a buffer of uint32 ids, ``parent`` the identity before ``start_block``. A trailing
    partial block has no identity.
    """
    view = memoryview(tokens).cast("B")
    width = 4 * block_size
    identities = []
    for offset in range(start_block * width, len(view) - width + 1, width):
        parent = sha256(parent + view[offset : offset + width]).digest()
        identities.append(parent)
    return identities


def split_identities(packed: bytes) -> list[bytes]:
    """Concatenated identities, as a Request carries them, one by one."""
    return [packed[i : i + ID_BYTES] for i in range(0, len(packed), ID_BYTES)]
