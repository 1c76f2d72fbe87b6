"""A receipt as a compact JWS (RFC 7515) with EdDSA over Ed25519 (RFC 8037).

    base64url(header) . base64url(payload) . base64url(signature)

The header names the key by its thumbprint (RFC 7638). Signatures are deterministic: a receipt that
is read twice is the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared.errors import ConfigError
from shared.receipts.receipt import decoded_bytes, encoded_bytes
from shared.transport.wire_errors import UNREADABLE

MAX_JWS_CHARS = 64 << 20
_encode = msgspec.json.Encoder().encode


class JwsHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An unknown field could be one that a verifier must understand (`crit`)."""

    alg: Literal["EdDSA"] = "EdDSA"
    kid: str
    typ: Literal["hearth-receipt+jws"] = "hearth-receipt+jws"


class PublicJwk(msgspec.Struct, frozen=True, kw_only=True):
    """The public key of a site as a JWK."""

    kty: Literal["OKP"] = "OKP"
    """The kind of the key."""
    crv: Literal["Ed25519"] = "Ed25519"
    """The curve."""
    x: str
    """The public key, in base64url."""
    kid: str = ""
    """The id of the key, which receipts name."""
    alg: str = "EdDSA"
    """The algorithm of the signatures."""
    use: str = "sig"
    """What the key is for: signatures."""
    site: str = ""
    """The site that signs with it; empty without sites."""

    @property
    def public(self) -> bytes:
        """Raises ConfigError for a key that is not one of Ed25519."""
        return public_of(self.x)


class JwkSet(msgspec.Struct, frozen=True):
    """The keys that sign receipts: that of this site, others of it that have signed or will next,
    then those of linked sites as they were first shown.
    """

    keys: tuple[PublicJwk, ...]
    """The keys."""


class ParsedJws(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a JWS whose signature has not been verified."""

    kid: str
    payload: bytes
    signed: bytes
    signature: bytes

    def is_signed_by(self, public: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(self.signature, self.signed)
        except InvalidSignature:
            return False
        return True


def thumbprint(public: bytes) -> str:
    members = b'{"crv":"Ed25519","kty":"OKP","x":"%b"}' % encoded_bytes(public).encode()
    return encoded_bytes(sha256(members).digest())


def jwk_of(public: bytes, site: str) -> PublicJwk:
    return PublicJwk(x=encoded_bytes(public), kid=thumbprint(public), site=site)


def public_of(text: str) -> bytes:
    """Decodes the `x` of a JWK. Raises ConfigError."""
    try:
        public = decoded_bytes(text)
    except ValueError:
        public = b""
    if len(public) != 32:
        raise ConfigError(f"{text[:64]!r} is no public key of Ed25519: 32 bytes in base64url")
    return public


def signed_jws(payload: bytes, public: bytes, sign: Callable[[bytes], bytes]) -> str:
    header = _encode(JwsHeader(kid=thumbprint(public)))
    text = f"{encoded_bytes(header)}.{encoded_bytes(payload)}"
    return f"{text}.{encoded_bytes(sign(text.encode()))}"


def parsed_jws(text: str) -> ParsedJws:
    """Reads a JWS without verifying it. Raises ConfigError, in one line."""
    if len(text) > MAX_JWS_CHARS:
        raise ConfigError(f"the receipt has more than {MAX_JWS_CHARS} characters")
    parts = text.split(".")
    if len(parts) != 3:
        raise ConfigError(f"a receipt has 3 parts between dots, this text has {len(parts)}")
    try:
        header, payload, signature = map(decoded_bytes, parts)
        kid = msgspec.json.decode(header, type=JwsHeader).kid
    except (ValueError, *UNREADABLE) as error:
        raise ConfigError(f"this text is no receipt: {error}") from None
    signed = text.rpartition(".")[0].encode()
    return ParsedJws(kid=kid, payload=payload, signed=signed, signature=signature)
