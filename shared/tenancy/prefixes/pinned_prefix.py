"""Named prefixes: a tenant's shared system prompts, and an operator's public prefixes.

    hearth:{tenant}:pinned_prefixes           name → Entry, for all prefixes of a tenant
    hearth:{tenant}:pinned_prefix:{name}      PinnedPrefix: the text and its tokens
    hearth:{tenant}:pinned_prefix_reasons     name → why the index cannot hold the prefix
    hearth:pinned_prefixes:tenants            tenants with prefixes, scored by creation time
    hearth:pinned_prefixes:version            increases with every change: readers poll it
    hearth:pinned_prefixes:changes            the tenants that changed, scored by that version
    hearth:pinned_prefixes:sizes              key of a PinnedPrefix → its bytes in Redis; `total`
    hearth:pinned_prefixes:ends               the keys of those that expire, scored by that time

Gateways write them, and add the tokens of a public one; the index reads them and has them pinned on
workers. Public prefixes belong to the tenant "", a name that no real tenant can have.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta

from shared.block_hash import PUBLIC_TENANT_ID
from shared.errors import HearthError
from shared.messages import ImagePart
from shared.packing import TOKEN_ID_BYTES
from shared.store import Store
from shared.tenancy.tenant import MAY_STORE_LUA, RECORD_KEYS, TenantRecord, class_argument
from shared.transport.wire_errors import UNREADABLE

VERSION_KEY = "hearth:pinned_prefixes:version"
TENANTS_KEY = "hearth:pinned_prefixes:tenants"
MAX_PER_TENANT = 64
MAX_BYTES_PER_TENANT = 64 << 20  # bytes of all its PinnedPrefix records
MIN_TENANTS = 4  # all tenants' bytes suffice for so many: none may take more than such a share
CHANGES_KEY = "hearth:pinned_prefixes:changes"
SIZES_KEY = "hearth:pinned_prefixes:sizes"
ENDS_KEY = "hearth:pinned_prefixes:ends"
RECORD_BYTES = 1024  # memory of Redis for a prefix besides its PinnedPrefix
MAX_CHANGES = 10_000  # tenants; who missed more changes reads all tenants
REASONS_S = 86_400
NEW = "new"  # instead of the digest of an Entry
PAGE = 500  # tenants that Redis looks at for one page
_REQUEST = "prefix:"
NAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

PrefixName = Annotated[str, Meta(pattern=NAME_PATTERN)]

_RECORD_CHANGE = f"""
local function record_change(version_key, changes_key, tenant)
  redis.call('ZADD', changes_key, redis.call('INCRBY', version_key, 1), tenant)
  redis.call('ZREMRANGEBYRANK', changes_key, 0, -{MAX_CHANGES + 1})
end
"""

_HAS_DIGEST = """
local function has_digest(entries_key, name, digest)
  local entry = redis.call('HGET', entries_key, name)
  return entry and cmsgpack.unpack(entry)[1] == digest
end
"""

# KEYS[7], KEYS[8]: the sizes, the ends. `ends_at`: 0: never.
_SET_SIZE = """
local function set_size(key, size, ends_at)
  local before = tonumber(redis.call('HGET', KEYS[7], key) or '0')
  redis.call('HINCRBY', KEYS[7], 'total', size - before)
  redis.call('HDEL', KEYS[7], key)
  redis.call('ZREM', KEYS[8], key)
  if size > 0 then redis.call('HSET', KEYS[7], key, size) end
  if ends_at > 0 then redis.call('ZADD', KEYS[8], ends_at, key) end
end
"""

# Counts and writes in one step, so that concurrent writes do not pass the limits together.
# KEYS: the tenant's entries, the prefix, the tenants with prefixes, the version, the changes, the
# tenant's reasons, the sizes, the ends, RECORD_KEYS: an operator may have changed the record.
# ARGV: name, Entry, PinnedPrefix, time when it expires (0: never), creation time, tenant, the
# limits of prefixes and of their bytes, the start of the keys of the tenant's prefixes, now, the
# limit of all tenants' bytes (-1: none), the digest in the Entry to replace (empty: any or none;
# NEW: there is no Entry), and the creation of the tenant, the writer's region and its classes.
SAVE_LUA = (
    MAY_STORE_LUA
    + _HAS_DIGEST
    + _RECORD_CHANGE
    + _SET_SIZE
    + f"""
if ARGV[13] and not may_store(KEYS[9], KEYS[10], ARGV[6], ARGV[13], ARGV[14], ARGV[15]) then
  return 'forbidden'
end
if ARGV[12] == '{NEW}' then
  if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 'changed' end
elseif ARGV[12] ~= '' and not has_digest(KEYS[1], ARGV[1], ARGV[12]) then
  return 'changed'
end
local now, ends_at, max_all = tonumber(ARGV[10]), tonumber(ARGV[4]), tonumber(ARGV[11])
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[8], '-inf', now, 'LIMIT', 0, 256)) do
  set_size(key, 0, 0)
end
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
local all = tonumber(redis.call('HGET', KEYS[7], 'total') or '0') + #ARGV[3] + {RECORD_BYTES}
all = all - tonumber(redis.call('HGET', KEYS[7], KEYS[2]) or '0')
if max_all >= 0 and all > max_all then return 'full' end
redis.call('SET', KEYS[2], ARGV[3])
if ends_at > 0 then redis.call('EXPIRE', KEYS[2], math.max(1, ends_at - math.floor(now))) end
set_size(KEYS[2], #ARGV[3] + {RECORD_BYTES}, ends_at)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[6], ARGV[1])
redis.call('ZADD', KEYS[3], 'NX', ARGV[5], ARGV[6])
record_change(KEYS[4], KEYS[5], ARGV[6])
return 'saved'
"""
)

# KEYS: as of SAVE_LUA, without RECORD_KEYS. ARGV: name, tenant, which leaves the tenants with its
# last prefix, and the digest in the Entry to delete (empty: any).
DELETE_LUA = (
    _HAS_DIGEST
    + _RECORD_CHANGE
    + _SET_SIZE
    + """
if ARGV[3] ~= '' and not has_digest(KEYS[1], ARGV[1], ARGV[3]) then return end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[6], ARGV[1])
set_size(KEYS[2], 0, 0)
if redis.call('HLEN', KEYS[1]) == 0 then redis.call('ZREM', KEYS[3], ARGV[2]) end
record_change(KEYS[4], KEYS[5], ARGV[2])
"""
)

# KEYS: the tenant's reasons, its entries. ARGV: seconds to live, then names, each followed by its
# reason. One of a prefix that was deleted meanwhile is not written.
EXPLAIN_LUA = """
for place = 2, #ARGV, 2 do
  local name, reason = ARGV[place], ARGV[place + 1]
  if reason ~= '' and redis.call('HEXISTS', KEYS[2], name) == 1 then
    redis.call('HSET', KEYS[1], name, reason)
  else
    redis.call('HDEL', KEYS[1], name)
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""

# KEYS: the version, the changes. ARGV: a tenant.
TOUCH_LUA = _RECORD_CHANGE + "record_change(KEYS[1], KEYS[2], ARGV[1])"

# KEYS: the version, the changes. ARGV: the version that is known, or -1. Returns the version, 1 if
# the changes since are complete, and the tenants that have changed.
CHANGES_LUA = f"""
local version, known = tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1])
if version == known then return {{version, 1}} end
if known < 0 or version < known or version - known > {MAX_CHANGES} then return {{version, 0}} end
local changed = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf')
table.insert(changed, 1, 1)
table.insert(changed, 1, version)
return changed
"""

# KEYS: the tenants. ARGV: a cursor, 0 at first. Returns the next one, 0 at last, and some tenants.
TENANTS_LUA = f"""
local page = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', {PAGE})
local found = {{page[1]}}
for place = 1, #page[2], 2 do found[#found + 1] = page[2][place] end
return found
"""


class TooManyPrefixes(HearthError):
    code = "too_many_prefixes"
    http_status = 409
    openai_type = "invalid_request_error"


class PrefixStorageFull(TooManyPrefixes):
    code = "prefix_storage_full"


class AllPrefixesFull(HearthError):
    """All tenants' prefixes together take as much of Redis as they may."""

    code = "all_prefixes_full"
    http_status = 507


class PrefixImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prefix: its tokens, its file as the client sent it, and how it is read."""

    part: ImagePart
    content: bytes
    media_type: str = ""
    detail: Literal["auto", "low", "high"] = "auto"


class PinnedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix. `messages` and `tools` are inputs of the chat template. `images` are those of the
    messages, in their order, as the weights of `revision` take them. Times are unix seconds.
    """

    name: PrefixName
    tenant_id: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    token_ids: bytes = b""  # packed; empty: no gateway has tokenized it yet
    cache_salt: str = ""
    created_at: int
    expires_at: int | None = None
    images: list[PrefixImage] = []
    revision: str = ""  # without images it may be any

    @property
    def is_public(self) -> bool:
        return self.tenant_id == PUBLIC_TENANT_ID

    @property
    def num_bytes(self) -> int:
        """The size of the record in Redis."""
        return len(_encode(self))

    @property
    def num_image_bytes(self) -> int:
        return sum(len(each.content) for each in self.images)

    @property
    def parts(self) -> tuple[ImagePart, ...]:
        return tuple(each.part for each in self.images)

    def is_of(self, revision: str) -> bool:
        """Returns whether its tokens and images are those of these weights."""
        return not self.images or self.revision == revision

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of all fields, in hex."""
        return _digest(_encode(self))


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
    for name, data in (await store.hash_get(entries_key(tenant_id))).items():
        entry = _decoded(data, Entry)
        if entry is not None:
            found[name.decode(errors="replace")] = entry
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of prefixes. `tenants` have changed since the version that was known; None: any may
    have.
    """

    version: int
    tenants: list[str] | None


async def changes(store: Store, known: int = -1) -> Changes:
    """Returns the changes since the version `known`, which the caller has read. Raises
    StoreUnavailable.
    """
    keys = [VERSION_KEY, CHANGES_KEY]
    version, is_complete, *tenants = await store.evaluate(CHANGES_LUA, keys, [known])
    return Changes(version, _texts(tenants) if is_complete else None)


async def load(
    store: Store, tenant_id: str, name: str, digest: str | None = None
) -> PinnedPrefix | None:
    """Loads a prefix. Returns None if it is missing or unreadable, or if the stored record has
    another `digest`. Raises StoreUnavailable.
    """
    data = await store.get(_body_key(tenant_id, name))
    if digest is not None and data is not None and _digest(data) != digest:
        return None
    prefix = None if data is None else _decoded(data, PinnedPrefix)
    if prefix is None or (prefix.tenant_id, prefix.name) != (tenant_id, name):
        return None
    return prefix


async def save(
    store: Store,
    prefix: PinnedPrefix,
    now: float,
    *,
    max_prefixes: int = MAX_PER_TENANT,
    max_all_bytes: int | None = None,
    replaces: str = "",
    owner: TenantRecord | None = None,
    region: str = "",
    region_classes: Iterable[str] = (),
) -> bool:
    """Adds a prefix, or replaces the one with the same name; with `replaces`, only one whose Entry
    has this digest, and with NEW none. Returns False if that fails, or if the present record of its
    `owner` forbids a writer of this region to store it, or is that of a later tenant.

    `now` is in unix seconds. `max_all_bytes` is the limit of Redis for all tenants' prefixes.
    `owner` is None for an operator; `region` is the writer's, `region_classes` contain it.
    Raises TooManyPrefixes, PrefixStorageFull or AllPrefixesFull, with nothing changed;
    StoreUnavailable.
    """
    num_tokens = len(prefix.token_ids) // TOKEN_ID_BYTES
    entry = Entry(prefix.digest, prefix.model, num_tokens, prefix.expires_at)
    keys = [*_keys(prefix.tenant_id, prefix.name), *RECORD_KEYS]
    max_own = MAX_BYTES_PER_TENANT
    if max_all_bytes is not None:
        max_own = min(max_own, max_all_bytes // MIN_TENANTS)
    arguments: list[str | bytes | int | float] = [
        *(prefix.name, _encode(entry), _encode(prefix), prefix.expires_at or 0, prefix.created_at),
        *(prefix.tenant_id, max_prefixes, max_own, _body_key(prefix.tenant_id, "")),
        *(now, -1 if max_all_bytes is None else max_all_bytes, replaces),
        *(() if owner is None else (owner.created_at, region, class_argument(region_classes))),
    ]
    match await store.evaluate(SAVE_LUA, keys, arguments):
        case b"forbidden" | b"changed":
            return False
        case b"too_many":
            raise TooManyPrefixes(f"there can be at most {max_prefixes} prefixes: delete one first")
        case b"too_large":
            raise PrefixStorageFull(
                f"with this prefix, all prefixes together take more than {max_own} bytes: delete "
                "one first"
            )
        case b"full":
            raise AllPrefixesFull("the prefixes of all tenants take all the room there is for them")
    return True


async def delete(store: Store, tenant_id: str, name: str, digest: str = "") -> None:
    """Deletes a prefix; with `digest`, unless its Entry has another one. Raises
    StoreUnavailable.
    """
    await store.evaluate(DELETE_LUA, _keys(tenant_id, name), [name, tenant_id, digest])


async def delete_all(store: Store, tenant_id: str) -> int:
    """Deletes the prefixes of one tenant. Returns how many there were. Raises StoreUnavailable."""
    names = list(await store.hash_get(entries_key(tenant_id)))
    for name in names:
        await delete(store, tenant_id, name.decode(errors="replace"))
    return len(names)


async def record_change(store: Store, tenant_id: str) -> None:
    """Readers read the tenant again: its record has changed. Raises StoreUnavailable."""
    await store.evaluate(TOUCH_LUA, [VERSION_KEY, CHANGES_KEY], [tenant_id])


async def explain(store: Store, tenant_id: str, reasons: Mapping[str, str]) -> None:
    """Records why prefixes are not warm, by name; empty for one that is. Raises
    StoreUnavailable.
    """
    keys = [_reasons_key(tenant_id), entries_key(tenant_id)]
    pairs = (part for each in reasons.items() for part in each)
    await store.evaluate(EXPLAIN_LUA, keys, [REASONS_S, *pairs])


async def reasons(store: Store, tenant_id: str) -> Mapping[str, str]:
    """Returns why the index cannot hold prefixes, by name. Raises StoreUnavailable."""
    found = await store.hash_get(_reasons_key(tenant_id))
    return {name.decode(errors="replace"): r.decode(errors="replace") for name, r in found.items()}


async def reason_of(store: Store, tenant_id: str, name: str) -> str | None:
    """Returns why the index cannot hold the prefix, if so. Raises StoreUnavailable."""
    return (await reasons(store, tenant_id)).get(name)


async def tenants(store: Store) -> AsyncIterator[str]:
    """Tenants that have prefixes, maybe some twice. Raises StoreUnavailable."""
    cursor = b"0"
    while True:
        cursor, *found = await store.evaluate(TENANTS_LUA, [TENANTS_KEY], [cursor])
        for each in _texts(found):
            yield each
        if cursor == b"0":
            return


def request_of_prefix(name: str) -> str:
    """Returns what stands for the id of a request where an image is that of a prefix."""
    return _REQUEST + name


def prefix_of_request(request_id: str) -> str | None:
    """Returns the name in a `request_of_prefix`; None for the id of a request."""
    return request_id.removeprefix(_REQUEST) if request_id.startswith(_REQUEST) else None


def key_part(tenant_id: str) -> str:
    """Returns the tenant id, quoted so that its keys never equal or match (as a pattern)
    another's.
    """
    return quote(tenant_id, safe="@")


def record_key(tenant_id: str, tip_hash: bytes) -> str:
    """Returns the key under which the index counts the uses of a prefix, pinned or not.

    `tip_hash` is the hash of its last block.
    """
    return f"hearth:{key_part(tenant_id)}:prefix:{tip_hash.hex()}"


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE:
        return None


def _texts(found: Sequence[bytes]) -> list[str]:
    return [each.decode(errors="replace") for each in found]


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _keys(tenant_id: str, name: str) -> list[str]:
    own = [entries_key(tenant_id), _body_key(tenant_id, name)]
    shared_keys = [TENANTS_KEY, VERSION_KEY, CHANGES_KEY]
    return [*own, *shared_keys, _reasons_key(tenant_id), SIZES_KEY, ENDS_KEY]


def entries_key(tenant_id: str) -> str:
    return f"hearth:{key_part(tenant_id)}:pinned_prefixes"


def _reasons_key(tenant_id: str) -> str:
    return f"hearth:{key_part(tenant_id)}:pinned_prefix_reasons"


def _body_key(tenant_id: str, name: str) -> str:
    return f"hearth:{key_part(tenant_id)}:pinned_prefix:{name}"
