"""The records of tenants in Redis: `hearth tenant` writes them, gateways read them.

    hearth:generation            random, written with the first tenant: Redis has its records
    hearth:tenants               hash: tenant id → its TenantRecord as JSON
    hearth:api_key:{digest}      hash: an ApiKeyRecord, under the SHA-256 of the key
    hearth:api_key:client:{id}   the same of a NATS client, which the NATS server authenticates
    hearth:{tenant}:keys         hash: key id → digest; client id → client:{id}
    hearth:{tenant}:meter        hash: the used part of the limits per minute
    hearth:{tenant}:open         sorted set: open requests, scored by the end of their lease
    hearth:{tenant}:usage:{day}  hash: {kind}:{model} → count; days are UTC, YYYY-MM-DD

The tenants of other sites are `{site}/{tenant}`; `tenant_copy.py` has their records.

The API key is never stored, only its digest. Every field of a key record has one writer, so that
two operators cannot overwrite each other's changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import ConfigError
from shared.messages import MAX_WEIGHT, Count, Name
from shared.subjects import SITE_SEPARATOR
from shared.transport.wire_errors import UNREADABLE

if TYPE_CHECKING:
    from shared.store import Store

GENERATION = "hearth:generation"
TENANTS = "hearth:tenants"
TENANT_COPIES = "hearth:tenant_copies"  # see `tenant_copy.py`
RECORD_KEYS = (TENANTS, TENANT_COPIES)  # of `may_store`
MAX_PRIORITY = 4
MAX_LISTED = 256

UsageKind = Literal["requests", "input_tokens", "cached_tokens", "output_tokens"]
USAGE_KINDS: tuple[UsageKind, ...] = ("requests", "input_tokens", "cached_tokens", "output_tokens")

# Limits that a gateway enforces, and the last one, which it forwards to the workers.
LIMITS = (
    *("requests_per_min", "input_tokens_per_min", "output_tokens_per_min", "concurrency"),
    "kv_quota_tokens",
)

# KEYS: all tenants. ARGV: a tenant id. Returns its record, as JSON.
RECORD_LUA = "return redis.call('HGET', KEYS[1], ARGV[1])"

# A writer in `region`, which is in `classes` (see `class_argument`), may store text of a tenant
# created at `created_at`: not of a removed one, also if there is a later one of its name. The
# function is also true for the public tenant. The record of a tenant of another site is in its
# copy, the bytes of a SignedCopy behind two heads of msgpack.
MAY_STORE_LUA = """
local function copied_record(data)
  local heads = {[0xc4] = 3, [0xc5] = 4}
  local _, copy = cmsgpack.unpack_one(data, heads[string.byte(data, 2)])
  return copy.record
end

local function may_store(tenants_key, copies_key, tenant, created_at, region, classes)
  if tenant == '' then return true end
  local is_copied = string.find(tenant, '/', 1, true)
  local data = redis.call('HGET', is_copied and copies_key or tenants_key, tenant)
  if not data then return false end
  local is_read, record = pcall(is_copied and copied_record or cjson.decode, data)
  if not is_read or type(record) ~= 'table' or record.is_zero_retention then return false end
  if (record.created_at or 0) ~= tonumber(created_at) then return false end
  local class = record.region_class or ''
  if class ~= '' and not string.find(classes, ',' .. class .. ',', 1, true) then return false end
  if type(record.allowed_regions) ~= 'table' then return true end
  for _, each in ipairs(record.allowed_regions) do
    if each == region and region ~= '' then return true end
  end
  return false
end
"""

# Part of Redis keys: no colon, and no character that a shell or a log would garble.
_TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")

_CLIENT = "client:"

Listed = Annotated[tuple[Name, ...], Meta(max_length=MAX_LISTED)]


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tenant and its limits. None means unlimited for limits, all for lists; zero and an empty
    list allow nothing.

    A limit per minute is a bucket that holds one minute's amount and refills evenly.
    """

    tenant_id: Annotated[str, Meta(min_length=1, max_length=256)]
    requests_per_min: Count | None = None
    input_tokens_per_min: Count | None = None
    output_tokens_per_min: Count | None = None
    concurrency: Count | None = None  # open requests
    kv_quota_tokens: Count | None = None  # tokens of one worker's cache
    allowed_models: Listed | None = None
    allowed_regions: Listed | None = None
    region_class: Annotated[str, Meta(max_length=64)] = ""  # one that is declared; empty: none
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0  # the maximum allowed
    weight: Annotated[float, Meta(gt=0, le=MAX_WEIGHT)] = 1.0
    is_zero_retention: bool = False
    sites: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()  # others that may serve it
    created_at: Annotated[float, Meta(ge=0)] = 0.0  # unix seconds, like all times here


class ApiKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    tenant_id: Annotated[str, Meta(min_length=1, max_length=256)]
    key_id: Name = ""
    created_at: Annotated[float, Meta(ge=0)] = 0.0
    expires_at: Annotated[float, Meta(ge=0)] | None = None  # set when the key is rotated
    revoked_at: Annotated[float, Meta(ge=0)] | None = None


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of one tenant, day, model and site; cached tokens are part of the input tokens. The
    site "" is this one.
    """

    tenant_id: str
    day: str
    model: str
    site: str = ""
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def check_tenant_id(tenant_id: str) -> str:
    """Returns a valid id unchanged. Raises ConfigError, also for a tenant of another site."""
    if SITE_SEPARATOR in tenant_id:
        home = tenant_id.partition(SITE_SEPARATOR)[0]
        raise ConfigError(f"{tenant_id!r} has its home at site {home!r}: change it there")
    if not _TENANT_ID.fullmatch(tenant_id):
        raise ConfigError(
            f"invalid tenant id {tenant_id!r}: only letters, digits and . _ @ -, at most 128, "
            "starting with a letter or digit"
        )
    return tenant_id


def class_argument(region_classes: Iterable[str]) -> str:
    """Returns the classes of a region for MAY_STORE_LUA."""
    return f",{','.join(region_classes)},"


def digest_of(api_key: str) -> str:
    return sha256(api_key.encode()).hexdigest()


def client_digest(client_id: str) -> str:
    """Returns what stands for the digest of a key in the records of a NATS client, which has no
    key.
    """
    return f"{_CLIENT}{client_id}"


def is_client(digest: str) -> bool:
    return digest.startswith(_CLIENT)


def api_key_record(digest: str) -> str:
    return f"hearth:api_key:{digest}"


def keys_of(tenant_id: str) -> str:
    return f"hearth:{tenant_id}:keys"


def meter_of(tenant_id: str) -> str:
    return f"hearth:{tenant_id}:meter"


def open_requests_of(tenant_id: str) -> str:
    return f"hearth:{tenant_id}:open"


def usage_of(tenant_id: str, day: str) -> str:
    return f"hearth:{tenant_id}:usage:{day}"


async def tenant_of(store: Store, tenant_id: str) -> TenantRecord | None:
    """Returns None without a record. Raises ConfigError for an unreadable one, StoreUnavailable."""
    data = await store.evaluate(RECORD_LUA, [TENANTS], [tenant_id])
    if data is None:
        return None
    record = decoded_tenant(data)
    if record is None:
        raise ConfigError(f"the record of the tenant {tenant_id!r} is unreadable")
    return record


def decoded_tenant(data: bytes) -> TenantRecord | None:
    """Decodes a record. Returns None if it is unreadable."""
    try:
        return msgspec.json.decode(data, type=TenantRecord)
    except UNREADABLE:
        return None
