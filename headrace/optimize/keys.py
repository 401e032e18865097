"""Who may sign a pack: this machine's own key, the public keys that its operator trusts, and the project's.

    $XDG_CONFIG_HOME/headrace/keys/    default ~/.config/headrace/keys
    ├── judge.pem                      private, 0600; made when the first pack is signed
    └── trusted/<name>.pub             public keys, PEM; the judge's own is among them

The project's own public keys come with the package (``core.signatures.PROJECT_KEYS``).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from headrace.core.errors import StartupError
from headrace.core.signatures import (
    PROJECT_KEYS,
    TRUSTED,
    Signature,
    check_signature,
    key_folder,
    key_id,
    read_keys,
)

__all__ = ["Keys", "Signature", "key_folder", "key_id"]

PRIVATE_KEY = "judge.pem"


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
        return read_keys(PROJECT_KEYS) | read_keys(self.folder / TRUSTED)

    def check(self, message: bytes, signature: Signature) -> str | None:
        """None if a trusted key signed exactly this, else the reason why it does not count."""
        where = f"the *.pub files in {self.folder / TRUSTED}, and the project's own"
        return check_signature(message, signature, self.trusted(), where)

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
