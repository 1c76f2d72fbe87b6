"""A tenant's record as its home site gives it to another site: signed, with a version.

    home: record and keys ──TenantCopy, signed──▶ other site: {home}/{tenant}, which only reads it

    hearth:tenant_versions   hash, at home: tenant id → {version}:{digest of record and keys}
    hearth:tenant_copies     hash, elsewhere: {home}/{tenant} → a SignedCopy as msgpack
    hearth:site_keys         hash, elsewhere: home site → the key that signs its copies
    hearth:sites             hash: sites that a gateway has heard over a link

The key of a site comes from its cluster secret, so that all its gateways sign alike.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta, structs

from shared.errors import ConfigError
from shared.messages import MAX_COPY_BYTES, Count, Name, SignedCopy
from shared.store import Store
from shared.subjects import is_at_site
from shared.tenancy.tenant import (
    RECORD_LUA,
    TENANT_COPIES,
    TenantRecord,
    check_tenant_id,
    tenant_of,
)
from shared.transport.wire_errors import UNREADABLE

TENANT_VERSIONS = "hearth:tenant_versions"
SITE_KEYS = "hearth:site_keys"
SITES = "hearth:sites"
MAX_KEYS = 64  # of one tenant, the newest ones
_PURPOSE = b"hearth tenant copy\0"

KeyDigest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class CopyRejected(ValueError):
    """Says in one line why a copy is not used."""


class TenantCopy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a tenant of the site `home`, for the site `site` alone. `key_digests` are those
    of the API keys that are valid.
    """

    home: Name
    site: Name
    version: Count
    record: TenantRecord
    key_digests: Annotated[tuple[KeyDigest, ...], Meta(max_length=MAX_KEYS)] = ()


class SigningKey:
    """The key with which a site signs the copies of its tenants."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def of_secret(cls, cluster_secret: str) -> SigningKey:
        secret = blake2b(cluster_secret.encode(), digest_size=32, person=b"hearth-tenants")
        return cls(Ed25519PrivateKey.from_private_bytes(secret.digest()))

    def sign(self, copy: TenantCopy) -> SignedCopy:
        """Raises CopyRejected if the copy is larger than another site takes."""
        body = msgspec.msgpack.encode(copy)
        if len(body) > MAX_COPY_BYTES:
            name = copy.record.tenant_id
            raise CopyRejected(
                f"the record of {name!r} takes {len(body)} bytes, {MAX_COPY_BYTES} at most"
            )
        return SignedCopy(body, self._private.sign(_PURPOSE + body))

    def sign_jws(self, data: bytes) -> bytes:
        """Returns the signature of a JWS, which is base64url: no copy begins so."""
        return self._private.sign(data)


def _check_names(record: TenantRecord) -> None:
    """Raises CopyRejected for names that a terminal would obey."""
    lists = (record.allowed_models or (), record.allowed_regions or (), record.sites)
    if not all(map(str.isprintable, (record.region_class, *chain.from_iterable(lists)))):
        raise CopyRejected(f"the record of {record.tenant_id!r} has names that are not printable")


def opened_copy(signed: SignedCopy, key: bytes) -> TenantCopy:
    """Returns the copy, whose signature is that of the public `key`. Raises CopyRejected."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signed.signature, _PURPOSE + signed.body)
        copy = msgspec.msgpack.decode(signed.body, type=TenantCopy)
        check_tenant_id(copy.record.tenant_id)
        _check_names(copy.record)
    except InvalidSignature:
        raise CopyRejected("a copy is not signed by the key of its home site") from None
    except UNREADABLE as error:
        raise CopyRejected(f"a copy is unreadable: {error}") from None
    except ConfigError as error:
        raise CopyRejected(error.message) from None
    return copy


def decoded_copy(name: str, data: bytes) -> TenantRecord | None:
    """Returns the record in a stored copy, under its name here; None for an unreadable one."""
    try:
        signed = msgspec.msgpack.decode(data, type=SignedCopy)
        record = msgspec.msgpack.decode(signed.body, type=TenantCopy).record
    except UNREADABLE:
        return None
    return structs.replace(record, tenant_id=name)


async def present_record(store: Store, tenant_id: str) -> TenantRecord | None:
    """Returns the record of a tenant of this site, or the copy of that of another one; None: there
    is none. Raises ConfigError for an unreadable one, StoreUnavailable.
    """
    if not is_at_site(tenant_id):
        return await tenant_of(store, tenant_id)
    data = await store.evaluate(RECORD_LUA, [TENANT_COPIES], [tenant_id])
    record = None if data is None else decoded_copy(tenant_id, data)
    if data is not None and record is None:
        raise ConfigError(f"the copy of the tenant {tenant_id!r} is unreadable")
    return record
