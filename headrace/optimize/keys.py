"""Who may sign a pack: this machine's own key, and the public keys that its operator trusts.

    $XDG_CONFIG_HOME/headrace/keys/    default ~/.config/headrace/keys
    ├── judge.pem                      private, 0600; made when the first pack is signed
    └── trusted/<name>.pub             public keys, PEM; the judge's own is among them

Keys are Ed25519. A key's id is the digest of its raw public bytes, 16 hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from headrace.core.errors import StartupError

PRIVATE_KEY = "judge.pem"
TRUSTED = "trusted"


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """``signature.json`` of a pack: Ed25519 over the bytes of its ``pack.json``, hexadecimal."""

    key: str
    signature: str
    algorithm: str = "ed25519"


def key_folder() -> Path:
    """Where keys are kept; ``XDG_CONFIG_HOME`` moves it."""
    base = os.environ.get("XDG_CONFIG_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.config")
    return Path(base) / "headrace" / "keys"


class Keys:
    """The keys in one folder, which need not exist yet."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = key_folder() if folder is None else folder

    def sign(self, message: bytes) -> Signature:
        """With this machine's own key, which is made and trusted if there is none."""
        private = self._private()
        return Signature(key=key_id(private.public_key()), signature=private.sign(message).hex())

    def trusted(self) -> dict[str, Ed25519PublicKey]:
        """Public keys by id. Raises StartupError for a file there that is no public key."""
        keys = {}
        for path in sorted((self.folder / TRUSTED).glob("*.pub")):
            try:
                key = serialization.load_pem_public_key(path.read_bytes())
            except (ValueError, UnsupportedAlgorithm, OSError) as error:
                raise StartupError(f"{path} is no public key: {error}", hint="remove it") from error
            if not isinstance(key, Ed25519PublicKey):
                raise StartupError(f"{path} is not an Ed25519 key", hint="remove it")
            keys[key_id(key)] = key
        return keys

    def check(self, message: bytes, signature: Signature) -> str | None:
        """None if a trusted key signed exactly this, else the reason why it does not count."""
        if signature.algorithm != "ed25519":
            return f"signed with {signature.algorithm!r}, only ed25519 counts"
        key = self.trusted().get(signature.key)
        if key is None:
            return (
                f"its signer, key {signature.key}, is not trusted here "
                f"(trusted keys are the *.pub files in {self.folder / TRUSTED})"
            )
        try:
            key.verify(bytes.fromhex(signature.signature), message)
        except (InvalidSignature, ValueError):
            return f"its signature is not one of key {signature.key} over this pack.json"
        return None

    def _private(self) -> Ed25519PrivateKey:
        path = self.folder / PRIVATE_KEY
        if not path.exists():
            self._make(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise StartupError(
                f"{path} may be read by others (mode {mode:04o}): a key that others know proves nothing",
                hint=f"chmod 600 {path}, or remove it and have packs signed anew",
            )
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise StartupError(f"{path} is no private key: {error}", hint="remove it") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise StartupError(f"{path} is not an Ed25519 key", hint="remove it")
        return key

    def _make(self, path: Path) -> None:
        private = Ed25519PrivateKey.generate()
        trusted = self.folder / TRUSTED
        trusted.mkdir(parents=True, exist_ok=True, mode=0o700)
        body = private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
        public = private.public_key()
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (trusted / f"judge-{key_id(public)}.pub").write_bytes(pem)
        try:
            os.link(partial, path)  # another process's key, made meanwhile, stays
        except FileExistsError:
            (trusted / f"judge-{key_id(public)}.pub").unlink()
        finally:
            partial.unlink()


def key_id(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]
