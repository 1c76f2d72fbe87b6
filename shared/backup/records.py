"""What a backup consists of. Texts of tenants are in StoredResponse and StoredPrefix alone."""

from __future__ import annotations

import msgspec

from shared.tenancy.deletion.kv_drops import KvDrop
from shared.tenancy.deletion.retractions import Retraction
from shared.tenancy.tenant import ApiKeyRecord

Fields = list[tuple[bytes, bytes]]


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key's record. `ttl_s`: Redis forgets an ended key after this time; None: never."""

    key_id: str
    digest: str
    record: ApiKeyRecord
    ttl_s: int | None = None


class StoredTenant(msgspec.Struct, frozen=True, kw_only=True, tag="tenant"):
    """`record` is a TenantRecord as JSON, with fields that this release does not know."""

    tenant_id: str
    record: bytes
    keys: tuple[StoredKey, ...] = ()
    aliases: Fields = []


class StoredHash(msgspec.Struct, frozen=True, kw_only=True, tag="hash"):
    """A hash of all tenants together, such as the model registry."""

    key: str
    fields: Fields


class StoredValue(msgspec.Struct, frozen=True, kw_only=True, tag="value"):
    key: str
    value: bytes


class StoredUsage(msgspec.Struct, frozen=True, kw_only=True, tag="usage"):
    """The counts of one tenant, day and site."""

    key: str
    tenant_id: str
    counts: list[tuple[bytes, int]]
    ttl_s: int | None = None


class StoredLines(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """Lines of an audit stream, oldest first: id, then fields and values."""

    key: str
    lines: list[tuple[bytes, list[bytes]]]


class StoredRetractions(msgspec.Struct, frozen=True, kw_only=True, tag="retractions"):
    entries: list[Retraction]


class StoredDrop(msgspec.Struct, frozen=True, kw_only=True, tag="kv_drop"):
    """An order that had not ended, or that a site had not confirmed."""

    drop: KvDrop


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True, tag="response"):
    tenant_id: str
    response_id: str
    data: bytes
    previous: bytes
    used_at: float
    ends_at: float


class StoredPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="prefix"):
    """`data` is a PinnedPrefix as msgpack."""

    tenant_id: str
    name: str
    data: bytes


Stored = (
    StoredTenant
    | StoredHash
    | StoredValue
    | StoredUsage
    | StoredLines
    | StoredRetractions
    | StoredDrop
    | StoredResponse
    | StoredPrefix
)
