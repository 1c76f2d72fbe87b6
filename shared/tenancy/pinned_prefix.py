"""Named prefixes: a tenant's shared system prompts, and an operator's public prefixes.

    hearth:{tenant}:pinned_prefixes           name → Entry, for all prefixes of a tenant
    hearth:{tenant}:pinned_prefix:{name}      PinnedPrefix: the text and its tokens
    hearth:pinned_prefixes:tenants            tenants with prefixes, scored by creation time
    hearth:pinned_prefixes:version            increases with every change: readers poll only this
                                              key

Gateways write them, and add the tokens of a public one; the index reads them and has them pinned on
workers. Public prefixes belong to the tenant "", a name that no real tenant can have.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta

from shared.block_hash import PUBLIC_TENANT_ID
from shared.errors import HearthError
from shared.packing import TOKEN_ID_BYTES
from shared.store import Store
from shared.transport.wire_errors import UNREADABLE

VERSION_KEY = "hearth:pinned_prefixes:version"
TENANTS_KEY = "hearth:pinned_prefixes:tenants"
MAX_PER_TENANT = 64
MAX_BYTES_PER_TENANT = 64 << 20  # of all its PinnedPrefix records
MAX_TENANTS = 1_000
NAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

PrefixName = Annotated[str, Meta(pattern=NAME_PATTERN)]

# Counts and writes in one step, so that concurrent writes do not pass the limits together.
# KEYS: the tenant's entries, the prefix, the tenants, the version. ARGV: name, Entry, PinnedPrefix,
# seconds to live (0: for ever), creation time, tenant, the limits of prefixes and of their bytes,
# and the start of the keys of the tenant's prefixes.
SAVE_LUA = """
local count, size = 1, #ARGV[3]
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if name ~= ARGV[1] then
    local length = redis.pcall('STRLEN', ARGV[9] .. name)
    count = count + 1
    if type(length) == 'number' then size = size + length end
  end
end
if count > tonumber(ARGV[7]) then return 'too_many' end
if size > tonumber(ARGV[8]) then return 'too_large' end
redis.call('SET', KEYS[2], ARGV[3])
if ARGV[4] ~= '0' then redis.call('EXPIRE', KEYS[2], ARGV[4]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[3], 'GT', ARGV[5], ARGV[6])
redis.call('INCRBY', KEYS[4], 1)
return 'saved'
"""


class TooManyPrefixes(HearthError):
    code = "too_many_prefixes"
    http_status = 409
    openai_type = "invalid_request_error"


class PrefixStorageFull(TooManyPrefixes):
    code = "prefix_storage_full"


class PinnedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """`messages` and `tools` are inputs of the chat template. Times are unix seconds."""

    name: PrefixName
    tenant_id: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    token_ids: bytes = b""  # packed; empty: no gateway has tokenized it yet
    cache_salt: str = ""
    allowed_regions: tuple[str, ...] = ()
    created_at: int
    expires_at: int | None = None

    @property
    def is_public(self) -> bool:
        return self.tenant_id == PUBLIC_TENANT_ID

    @property
    def num_bytes(self) -> int:
        """The size of the record in Redis."""
        return len(_encode(self))

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of all fields, in hex."""
        return blake2b(_encode(self), digest_size=16).hexdigest()


class Entry(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    model: str
    num_tokens: int
    expires_at: int | None

    def is_over(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


_encode = msgspec.msgpack.Encoder().encode


async def entries(store: Store, tenant_id: str) -> Mapping[str, Entry]:
    """Entries by name, without unreadable ones. Raises StoreUnavailable."""
    found = {}
    for name, data in (await store.hash_get(_entries_key(tenant_id))).items():
        entry = _decoded(data, Entry)
        if entry is not None:
            found[name.decode(errors="replace")] = entry
    return dict(sorted(found.items()))


async def load(store: Store, tenant_id: str, name: str) -> PinnedPrefix | None:
    """None if it is missing or unreadable. Raises StoreUnavailable."""
    data = await store.get(_body_key(tenant_id, name))
    prefix = None if data is None else _decoded(data, PinnedPrefix)
    if prefix is None or (prefix.tenant_id, prefix.name) != (tenant_id, name):
        return None
    return prefix


async def save(
    store: Store, prefix: PinnedPrefix, now: float, *, max_prefixes: int = MAX_PER_TENANT
) -> None:
    """Adds a prefix, or replaces the one with the same name. `now`: unix seconds.

    Raises TooManyPrefixes or PrefixStorageFull, with nothing changed; StoreUnavailable.
    """
    num_tokens = len(prefix.token_ids) // TOKEN_ID_BYTES
    entry = Entry(prefix.digest, prefix.model, num_tokens, prefix.expires_at)
    life_s = 0 if prefix.expires_at is None else max(1, prefix.expires_at - int(now))
    keys = [
        _entries_key(prefix.tenant_id),
        _body_key(prefix.tenant_id, prefix.name),
        TENANTS_KEY,
        VERSION_KEY,
    ]
    arguments: list[str | bytes | int | float] = [
        *(prefix.name, _encode(entry), _encode(prefix), life_s, prefix.created_at),
        *(prefix.tenant_id, max_prefixes, MAX_BYTES_PER_TENANT, _body_key(prefix.tenant_id, "")),
    ]
    match await store.evaluate(SAVE_LUA, keys, arguments):
        case b"too_many":
            raise TooManyPrefixes(f"there can be at most {max_prefixes} prefixes: delete one first")
        case b"too_large":
            raise PrefixStorageFull(
                f"with this prefix, all prefixes together take more than {MAX_BYTES_PER_TENANT} "
                "bytes: delete one first"
            )


async def delete(store: Store, tenant_id: str, name: str) -> None:
    """Raises StoreUnavailable."""
    await store.write(
        [
            ("DEL", _body_key(tenant_id, name)),
            ("HDEL", _entries_key(tenant_id), name),
            ("INCRBY", VERSION_KEY, 1),
        ]
    )


async def tenants(store: Store) -> list[str]:
    """Tenants that may have prefixes, at most MAX_TENANTS. Raises StoreUnavailable."""
    found = await store.sorted_set_head(TENANTS_KEY, MAX_TENANTS)
    return [each.decode(errors="replace") for each in found]


def key_part(tenant_id: str) -> str:
    """The tenant id, quoted so that its keys never equal or match (as a pattern) another's."""
    return quote(tenant_id, safe="@")


def record_key(tenant_id: str, tip_hash: bytes) -> str:
    """The key under which the index counts the uses of a prefix, pinned or not.

    `tip_hash` is the hash of its last block.
    """
    return f"hearth:{key_part(tenant_id)}:prefix:{tip_hash.hex()}"


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE:
        return None


def _entries_key(tenant_id: str) -> str:
    return f"hearth:{key_part(tenant_id)}:pinned_prefixes"


def _body_key(tenant_id: str, name: str) -> str:
    return f"hearth:{key_part(tenant_id)}:pinned_prefix:{name}"
