"""Signatures over a pack's manifest, and the public keys that they are checked against.

Keys are Ed25519, public ones lie as PEM in ``<name>.pub`` files. A key's id is the digest of its raw public
bytes, 16 hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.core.errors import PackError, StartupError
from headrace.core.files import MEGABYTE, read_regular

if TYPE_CHECKING:  # the library takes a while to import, and few need it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PROJECT_KEYS = Path(__file__).parent / "trusted"
"""The public keys of those who sign the packs that ship with Headrace."""

TRUSTED = "trusted"

MAX_BYTES = 64 * MEGABYTE
"""The largest manifest or signature that is read."""


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """``signature.json`` of a pack: Ed25519 over the bytes of its ``pack.json``, hexadecimal."""

    key: str
    signature: str
    algorithm: str = "ed25519"


def key_folder() -> Path:
    """Where this user's keys are kept; ``XDG_CONFIG_HOME`` moves it."""
    base = os.environ.get("XDG_CONFIG_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.config")
    return Path(base) / "headrace" / "keys"


def check_signed(folder: Path) -> None:
    """Raises PackError unless the project's key, or one that this user trusts, signed the pack's manifest.
    The files are checked against the manifest by whoever builds them."""
    own = key_folder() / TRUSTED
    try:
        body = read_regular(folder / "pack.json", MAX_BYTES)
        signed = read_regular(folder / "signature.json", MAX_BYTES)
        signature = msgspec.json.decode(signed, type=Signature)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PackError(
            f"{folder} is no signed pack: {error}", hint="`headrace packs list` shows those that are"
        ) from error
    where = f"the *.pub files in {own}, and the project's own"
    reason = check_signature(body, signature, read_keys(PROJECT_KEYS) | read_keys(own), where)
    if reason is not None:
        raise PackError(f"pack {folder.name}: {reason}")


def read_keys(folder: Path) -> dict[str, Ed25519PublicKey]:
    """The public keys in a folder, by id. Raises StartupError for a file there that is no public key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    keys = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm, OSError) as error:
            raise StartupError(f"{path} is no public key: {error}", hint="remove it") from error
        if not isinstance(key, Ed25519PublicKey):
            raise StartupError(f"{path} is not an Ed25519 key", hint="remove it")
        keys[key_id(key)] = key
    return keys


def check_signature(
    message: bytes, signature: Signature, keys: Mapping[str, Ed25519PublicKey], where: str
) -> str | None:
    """None if one of ``keys`` signed exactly this, else the reason why it does not count.

    ``where`` says in words which keys are trusted.
    """
    from cryptography.exceptions import InvalidSignature

    if signature.algorithm != "ed25519":
        return f"signed with {signature.algorithm!r}, only ed25519 counts"
    key = keys.get(signature.key)
    if key is None:
        return f"its signer, key {signature.key}, is not trusted here (trusted keys are {where})"
    try:
        key.verify(bytes.fromhex(signature.signature), message)
    except (InvalidSignature, ValueError):
        return f"its signature is not one of key {signature.key} over this pack.json"
    return None


def key_id(key: Ed25519PublicKey) -> str:
    from cryptography.hazmat.primitives import serialization

    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]
