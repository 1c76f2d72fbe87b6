"""NATS's keys: Ed25519 key pairs in base32 text, with which a client signs the server's nonce.

The server knows public keys alone. Format: one byte for the kind, 32 bytes, and a CRC16
(github.com/nats-io/nkeys); a seed has two bytes for "seed" and the kind.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.errors import ConfigError

_SEED, _USER = 18 << 3, 20 << 3  # "S", "U"
_SEED_PREFIX = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])
_BYTES = 32
API_KEY = "api"  # derived from a gateway's: its key among the API clients


class UserKey:
    """The key pair of a user."""

    def __init__(self, secret: bytes) -> None:
        """`secret` has 32 bytes."""
        self._secret = secret
        self._private = Ed25519PrivateKey.from_private_bytes(secret)

    @classmethod
    def create(cls) -> UserKey:
        return cls(os.urandom(_BYTES))

    @classmethod
    def of_seed(cls, text: str) -> UserKey:
        """Reads the key of a seed. Raises ValueError."""
        data = base64.b32decode(text.strip() + "=" * (-len(text.strip()) % 8))
        body, checksum = data[:-2], data[-2:]
        if checksum != _checksum(body) or len(body) != 2 + _BYTES or body[:2] != _SEED_PREFIX:
            raise ValueError("it is no seed of a user (SU…)")
        return cls(body[2:])

    @classmethod
    def of_file(cls, path: Path) -> UserKey:
        """Reads the key of a seed's file. Raises ConfigError."""
        try:
            return cls.of_seed(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except ValueError:  # the text of the error may hold the seed
            raise ConfigError(f"{path}: it is no seed of a NATS user (SU…)") from None

    @property
    def seed(self) -> str:
        return _text(_SEED_PREFIX + self._secret)

    @property
    def public(self) -> str:
        return _text(bytes([_USER]) + self._private.public_key().public_bytes_raw())

    def sign(self, nonce: str) -> bytes:
        return base64.urlsafe_b64encode(self._private.sign(nonce.encode())).rstrip(b"=")

    def derived(self, name: str) -> UserKey:
        """Derives another key from this one."""
        return UserKey(hmac.digest(self._secret, name.encode(), hashlib.sha256))


def _text(body: bytes) -> str:
    return base64.b32encode(body + _checksum(body)).decode().rstrip("=")


def _checksum(body: bytes) -> bytes:
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")
