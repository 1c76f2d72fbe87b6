"""Finds the tenants of API keys and NATS clients.

A NATS client has a record like a key's. The NATS server authenticates it: its id is in the subject
of each of its requests.

A cached key is looked up again after `REFRESH_S`, so a revoked key and a changed limit take effect
within that time. A request waits for the look-up at most `KNOWN_KEY_WAIT_S` and then continues with
the cached record; the next request uses the look-up's result. While Redis is unavailable, cached
keys are valid with the cached records of their tenants; unknown keys cannot be checked. A Redis
without `hearth:generation` is new, or has lost its records if this gateway has seen some. Both
count as unavailable, since every key would be invalid otherwise.

A key that Redis does not know may be of a tenant of another site, of which this gateway has a copy:
a tenant of this site comes first. Its home site has to confirm the copy again and again.

A near replica of Redis may answer first. Its replies count only if they have the key, since it may
lag.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import msgspec
import structlog

from services.gateway.tenancy.errors import TenantCopyStale, UnknownTenant
from services.gateway.tenancy.region_rule import RegionRule
from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import AuthenticationFailed, DependencyUnavailable
from shared.store import BREAKER_S, STORE_TIMEOUT_S, Store, StoreRejected, StoreUnavailable
from shared.tenancy.copied_tenants import CopiedTenants
from shared.tenancy.tenant import (
    GENERATION,
    TENANTS,
    ApiKeyRecord,
    TenantRecord,
    api_key_record,
    client_digest,
    digest_of,
    is_client,
)
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

REFRESH_S = 0.5  # below 1 s with Redis's latency
SECOND_TRY_S = BREAKER_S + 0.05
NUM_CONNECTIONS = 32  # opened at the start
MAX_COPIED_KEYS = 8192  # in use, and remembered as unknown to Redis
KNOWN_KEY_WAIT_S = STORE_TIMEOUT_S

EMPTY_ADVICE = "restore Redis from its append-only file; a new one needs `hearth tenant add`"
NEW_ADVICE = "no tenant yet: hearth tenant add; if there were some, restore Redis from its file"

RedisState = Literal["ok", "unavailable", "empty", "new"]

# KEYS: an API key's record, all tenants, the generation. Returns the key's fields, its tenant's
# record, the time, and 1 if Redis has records, else 0. The Redis of an earlier release has tenants
# and no generation.
LOOK_UP = """
local key = redis.call('HGETALL', KEYS[1])
local tenant_id = redis.call('HGET', KEYS[1], 'tenant_id')
local tenant = tenant_id and redis.call('HGET', KEYS[2], tenant_id)
local has_records = math.min(1, redis.call('EXISTS', KEYS[3], KEYS[2]))
return {key, tenant or false, redis.call('TIME')[1], has_records}
"""


def _has_regions_of(cached: TenantRecord, current: TenantRecord | None) -> bool:
    regions = cached.allowed_regions, cached.region_class
    return current is not None and regions == (current.allowed_regions, current.region_class)


@dataclass(frozen=True, slots=True)
class _CachedTenant:
    tenant: TenantRecord
    checked_at: float
    expires_at: float  # time of the gateway's clock


class ApiKeys:
    """The tenants of API keys and NATS clients. Only valid keys are cached, so that invalid keys
    cannot fill the cache.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        replica: Store | None = None,
        copied: CopiedTenants | None = None,
        stale_s: float = inf,
        rule: RegionRule | None = None,
    ) -> None:
        """`copied` are the tenants of other sites, which are served for `stale_s` seconds after
        their confirmation. `rule` refuses tenants of other regions than this gateway's.
        """
        self._rule = RegionRule() if rule is None else rule
        self._stores = (store,) if replica is None else (replica, store)
        self._clock = clock
        self._redis_state: RedisState = "ok"
        self._has_seen_records = False
        self._polled_at = -inf
        self._known: dict[str, _CachedTenant] = {}
        self._lookups: dict[str, asyncio.Task[TenantRecord]] = {}
        self._copied = CopiedTenants("") if copied is None else copied
        self._stale_s = stale_s
        self._unknown_at: dict[str, float] = {}  # keys of copies, which Redis did not know then

    async def warm_up(self) -> None:
        """Opens the connections to Redis, so that a first burst does not wait for them: after a
        late reply, each gateway would count limits alone.
        """
        await asyncio.gather(
            *(self._request(digest_of("")) for _ in range(NUM_CONNECTIONS)), return_exceptions=True
        )

    @property
    def redis_state(self) -> RedisState:
        """Redis's state at the last request to it."""
        return self._redis_state

    async def poll_redis(self) -> None:
        """Updates `redis_state`, at most once in REFRESH_S."""
        if self._clock.now() - self._polled_at >= REFRESH_S:
            self._polled_at = self._clock.now()
            with contextlib.suppress(StoreUnavailable):
                await self._request(digest_of(""))

    def known_tenant_id(self, authorization: str | None) -> str | None:
        """Returns the tenant of a key that was valid at its last look-up, or None. It is used only
        to order requests.
        """
        try:
            known = self._known.get(digest_of(bearer_of(authorization)))
        except AuthenticationFailed:
            return None
        return None if known is None else known.tenant.tenant_id

    async def tenant_of(self, authorization: str | None) -> TenantRecord:
        """Returns the tenant of an Authorization header. Raises AuthenticationFailed,
        UnknownTenant, NoRegionAllowed, and DependencyUnavailable for a new key without Redis and
        for records that cannot be read.
        """
        return self._rule.admitted(await self._tenant_of(digest_of(bearer_of(authorization))))

    async def tenant_of_client(self, client_id: str) -> TenantRecord:
        """Returns the tenant of a NATS client. Raises as `tenant_of` does."""
        return self._rule.admitted(await self._tenant_of(client_digest(client_id)))

    def forget(self, tenant_id: str, current: TenantRecord | None = None) -> None:
        """Has the record of a tenant that has changed read again, unless it is cached with the
        regions of its `current` one: without Redis it could not be read.
        """
        self._known = {
            digest: each
            for digest, each in self._known.items()
            if each.tenant.tenant_id != tenant_id or _has_regions_of(each.tenant, current)
        }

    async def _tenant_of(self, digest: str) -> TenantRecord:
        known = self._known.get(digest)
        if known is not None and self._clock.now() - known.checked_at < REFRESH_S:
            return self._unexpired(known)
        if self._clock.now() - self._unknown_at.get(digest, -inf) < REFRESH_S:
            return self._copied_tenant(digest)
        lookup = self._lookups.get(digest)
        if lookup is None:  # concurrent requests share one lookup
            lookup = start_awaited(self._look_up(digest))
            self._lookups[digest] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(digest))
        if known is not None:
            await asyncio.wait({lookup}, timeout=KNOWN_KEY_WAIT_S)
            if not lookup.done():
                return self._unexpired(known)
        return await asyncio.shield(lookup)

    async def _look_up(self, digest: str) -> TenantRecord:
        try:
            reply = await self._request(digest)
        except StoreRejected as error:
            raise _unreadable(error) from error
        except StoreUnavailable:
            if digest in self._known:
                return self._unexpired(self._known[digest])
            if digest in self._unknown_at:
                return self._copied_tenant(digest)
            reply = await self._second_try(digest)
        self._known.pop(digest, None)
        if not reply[0] and self._copied.find(digest) is not None:
            if len(self._unknown_at) >= MAX_COPIED_KEYS:
                self._unknown_at.clear()
            self._unknown_at[digest] = self._clock.now()
            return self._copied_tenant(digest)
        self._unknown_at.pop(digest, None)
        known = self._judge(reply, _name_of(digest))
        self._known[digest] = known
        return known.tenant

    def _copied_tenant(self, digest: str) -> TenantRecord:
        """Returns the tenant of another site. Raises AuthenticationFailed, TenantCopyStale."""
        found = self._copied.find(digest)
        if found is None:
            del self._unknown_at[digest]
            raise AuthenticationFailed("the API key is not valid")
        silent_s = self._clock.now() - found.confirmed_at
        if silent_s > self._stale_s:
            since = "started" if silent_s == inf else f"heard it {silent_s:.0f} s ago"
            raise TenantCopyStale(
                f"this tenant's home is site {found.copy.home!r}, which has not confirmed it since "
                f"this gateway {since}"
            )
        return found.tenant

    async def _request(self, digest: str) -> list[Any]:
        """Looks a key up. Raises StoreUnavailable, also for a Redis that has no tenant's record."""
        keys = [api_key_record(digest), TENANTS, GENERATION]
        *replicas, primary = self._stores
        for replica in replicas:
            with contextlib.suppress(StoreUnavailable):
                *copied, _ = await replica.evaluate(LOOK_UP, keys, [])
                if _is_complete(copied):
                    return copied
        try:
            *reply, has_records = await primary.evaluate(LOOK_UP, keys, [])
        except StoreRejected:
            raise
        except StoreUnavailable:
            self._transition_to("unavailable")
            raise
        self._has_seen_records = self._has_seen_records or bool(has_records)
        self._transition_to("ok" if has_records else "empty" if self._has_seen_records else "new")
        if not has_records:
            raise StoreUnavailable(f"Redis is empty: it has no {GENERATION}")
        return reply

    def _transition_to(self, state: RedisState) -> None:
        if state == "empty" != self._redis_state:
            log.error("redis_is_empty", missing=GENERATION, advice=EMPTY_ADVICE)
        if state == "new" != self._redis_state:
            log.info("redis_is_new", advice=NEW_ADVICE)
        self._redis_state = state

    async def _second_try(self, digest: str) -> list[Any]:
        """Repeats the look-up once: a burst of requests at this gateway can also cause a short
        timeout.
        """
        await self._clock.sleep(SECOND_TRY_S)
        try:
            return await self._request(digest)
        except StoreRejected as error:
            raise _unreadable(error) from error
        except StoreUnavailable:
            raise DependencyUnavailable(
                "API keys cannot be checked at the moment", retry_after_s=1.0
            ) from None

    def _judge(self, reply: list[Any], name: str) -> _CachedTenant:
        fields, tenant, redis_time = reply
        if not fields:
            raise AuthenticationFailed(f"the {name} is not valid")
        try:
            pairs = zip(fields[::2], fields[1::2], strict=True)
            texts = {name.decode(): value.decode() for name, value in pairs}
            key = msgspec.convert(texts, ApiKeyRecord, strict=False)
            if key.revoked_at is not None:
                raise AuthenticationFailed(f"the {name} has been revoked")
            if tenant is None:
                raise UnknownTenant(f"the {name}'s tenant {key.tenant_id!r} does not exist")
            record = msgspec.json.decode(tenant, type=TenantRecord)
        except UNREADABLE as error:
            raise _unreadable(error) from error
        if record.tenant_id != key.tenant_id:
            raise _unreadable("the record belongs to another tenant")
        left_s = inf if key.expires_at is None else key.expires_at - float(redis_time)
        now = self._clock.now()
        known = _CachedTenant(record, now, now + left_s)
        self._unexpired(known)
        return known

    def _unexpired(self, known: _CachedTenant) -> TenantRecord:
        if self._clock.now() >= known.expires_at:
            raise AuthenticationFailed("the API key has expired: it was replaced by a newer one")
        return known.tenant


def _name_of(digest: str) -> str:
    return "NATS client" if is_client(digest) else "API key"


def _is_complete(reply: list[Any]) -> bool:
    """Returns whether a key and its tenant were found."""
    return bool(reply[0]) and reply[1] is not None


def _unreadable(reason: object) -> DependencyUnavailable:
    log.error("tenant_unreadable", error=str(reason))
    return DependencyUnavailable("the record of this API key, or of its tenant, is unreadable")


def bearer_of(authorization: str | None) -> str:
    if authorization is None:
        raise AuthenticationFailed(
            "send the API key as `Authorization: Bearer <key>` or `x-api-key: <key>`"
        )
    scheme, _, api_key = authorization.partition(" ")
    api_key = api_key.strip()
    if scheme.lower() != "bearer" or not api_key:
        raise AuthenticationFailed("the Authorization header must be `Bearer <key>`")
    return api_key
