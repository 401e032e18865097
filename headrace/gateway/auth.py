"""Who may call: bearer keys, compared in constant time."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from headrace.core.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class Keys:
    """The accepted API keys; without any, every caller may pass."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, path: str, authorization: bytes | None) -> None:
        """Raises AuthenticationError unless ``path`` is open or the header holds an accepted key."""
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise AuthenticationError(
                "an API key is needed", hint="Send it as the header 'Authorization: Bearer KEY'."
            )
        digest = sha256(key.strip()).digest()
        if sum([compare_digest(digest, known) for known in self._digests]) == 0:
            raise AuthenticationError("the API key is wrong")
