"""Seals the text of reasoning, so that a client returns it unread and unchanged.

hearth1.{base64url of nonce ‖ AES-256-GCM(text)}     associated data: the tenant
"""

from __future__ import annotations

import contextlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shared.secrets.secret import Derived, Secret

PREFIX = "hearth1."
NONCE_BYTES = 12
_INFO = b"hearth sealed reasoning"


class Seal:
    """`secret`: of all gateways. `random_bytes(n)`: returns n random bytes."""

    def __init__(self, secret: Secret, random_bytes: Callable[[int], bytes]) -> None:
        self._ciphers = Derived(secret, _cipher)
        self._random_bytes = random_bytes

    def seal(self, tenant_id: str, text: str) -> str:
        nonce = self._random_bytes(NONCE_BYTES)
        cipher = self._ciphers.accepted[0]  # a file of a secret is never used when it is empty
        sealed = cipher.encrypt(nonce, text.encode(), tenant_id.encode())
        return PREFIX + urlsafe_b64encode(nonce + sealed).decode()

    def open(self, tenant_id: str, sealed: str) -> str | None:
        """Returns None for a text that these gateways did not give this tenant."""
        if not sealed.startswith(PREFIX):
            return None
        try:
            data = urlsafe_b64decode(sealed.removeprefix(PREFIX))
        except ValueError:
            return None
        nonce, encrypted = data[:NONCE_BYTES], data[NONCE_BYTES:]
        for cipher in self._ciphers.accepted:
            with contextlib.suppress(ValueError, InvalidTag):
                return cipher.decrypt(nonce, encrypted, tenant_id.encode()).decode()
        return None


def _cipher(secret: str) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, salt=None, info=_INFO).derive(secret.encode()))
