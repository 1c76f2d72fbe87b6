"""Keeps the copies of other sites' tenants: asks one gateway of each linked site twice a second.

Copies that this gateway uses are in its memory, and each is verified. Redis has them for operators,
and for a gateway that starts: it knows the tenants, and serves none of them before their home site
has confirmed them to this very process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import structlog

from services.gateway.sites.linked_homes import LinkedHome, LinkedHomes, site_of
from shared.background import Background, failing_alone, is_logged
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import ReadTenantCopies, SignedCopy, TenantCopies
from shared.store import Command, Store, StoreUnavailable, reading_reply
from shared.telemetry.log_limit import LogLimit
from shared.tenancy.copied_tenants import CopiedTenants, CopyChanges
from shared.tenancy.deletion.kv_drops import DropReason
from shared.tenancy.deletion.tenant_removal import TenantWithdrawal
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.tenant import TENANT_COPIES
from shared.tenancy.tenant_copy import SITE_KEYS, CopyRejected
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

READ_S = 0.5
IDLE_READ_S = 2.0  # of a site that has no tenant for this one
TICK_S = 0.25
TIMEOUT_S = 2.0
T = TypeVar("T")

# KEYS: the keys of sites. ARGV: a site, the key that it shows. Returns the first that it showed.
PIN_LUA = """
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1])
"""


class TenantCopyReader:
    def __init__(
        self,
        homes: LinkedHomes,
        clock: Clock,
        store: Store,
        copied: CopiedTenants,
        withdrawal: TenantWithdrawal,
        *,
        gateway_id: str,
    ) -> None:
        """`gateway_id` is `{site}/{gateway}`, the name of this gateway at other sites. `withdrawal`
        deletes what this site holds of tenants that it may serve no more.
        """
        self._withdrawal = withdrawal
        self._due: dict[str, DropReason] = {}
        self._unstored: dict[str, SignedCopy | None] = {}  # None: to be deleted
        self._homes = homes
        self._clock = clock
        self._store = store
        self._copied = copied
        self._name = gateway_id
        self._background = Background()
        self._lines = LogLimit(clock.now)

    async def start(self) -> None:
        with failing_alone("tenant_copies_not_restored"):
            await self._restore()
        self._background.start_own(self._run())

    async def stop(self) -> None:
        await self._background.stop()

    async def _restore(self) -> None:
        try:
            keys = await self._store.hash_get(SITE_KEYS)
            stored = await self._store.hash_get(TENANT_COPIES)
        except StoreUnavailable as error:
            log.warning("tenant_copies_not_restored", error=error.message)
            return
        for name, data in stored.items():
            home = site_of(name.decode(errors="replace"))
            try:
                signed = msgspec.msgpack.decode(data, type=SignedCopy)
                self._copied.restore(home, signed, keys.get(home.encode(), b""))
            except (CopyRejected, *UNREADABLE) as error:
                log.warning("tenant_copy_rejected", site=home, error=str(error))

    async def _run(self) -> None:
        while True:
            now = self._clock.now()
            for site, home in self._homes.by_site.items():
                interval_s = READ_S if home.has_tenants else IDLE_READ_S
                is_due = not home.is_asked and now - home.asked_at >= interval_s
                if is_due and self._homes.is_heard(site):
                    home.is_asked, home.asked_at = True, now
                    self._background.start_item(self._ask(site, home), is_logged)
            await self._clock.sleep(TICK_S)

    async def _ask(self, site: str, home: LinkedHome) -> None:
        command = ReadTenantCopies(gateway_id=self._name, held=self._copied.versions(site))
        try:
            reply = await self._homes.request(site, command, TenantCopies, timeout_s=TIMEOUT_S)
            if await self._trusts(site, home, reply.key):
                home.has_tenants = bool(reply.versions)
                self._note(site, self._copied.take(site, reply, home.asked_at))
                await self._withdraw(site)
                await self._apply(site)
        except HearthError as error:
            log.debug("tenant_copies_not_read", site=site, error=error.message)
        finally:
            home.is_asked = False

    async def _trusts(self, site: str, home: LinkedHome, key: bytes) -> bool:
        """Whether `key` is the first that this site has shown here, or that since an operator has
        accepted a new one. Raises StoreUnavailable.
        """
        if key == home.key:
            return True
        reply = await self._store.evaluate(PIN_LUA, [SITE_KEYS], [site, key])
        with reading_reply():
            is_known = bytes(reply) == key
        if is_known:
            home.key = key
        elif home.rejected_key != key:
            home.rejected_key = key
            advice = f"if its cluster secret is new: hearth tenant trust {site}"
            self._lines.write(
                log.warning, "site_key_rejected", site, site=site, key=key.hex(), advice=advice
            )
        return is_known

    def _note(self, site: str, changes: CopyChanges) -> None:
        for reason in changes.rejected:
            self._lines.write(log.warning, "tenant_copy_rejected", site, site=site, error=reason)
        self._due |= changes.due
        self._unstored |= changes.stored

    async def _withdraw(self, site: str) -> None:
        """Deletes what is due; what Redis does not take now is due with the next reply."""
        for name, reason in _of_site(site, self._due).items():
            await self._withdrawal.delete(name, reason)
            if self._due.get(name) == reason:
                del self._due[name]

    async def _apply(self, site: str) -> None:
        """Stores what has changed, after the deletions: a gateway that starts finds from the copies
        in Redis what is due. Without Redis a copy is used all the same.
        """
        stored = _of_site(site, self._unstored)
        if stored:
            await self._store.write([_command(name, signed) for name, signed in stored.items()])
        for name in stored:
            await pinned_prefix.record_change(self._store, name)  # pins follow the record
            del self._unstored[name]


def _of_site(site: str, named: Mapping[str, T]) -> dict[str, T]:
    return {name: each for name, each in named.items() if site_of(name) == site}


def _command(name: str, signed: SignedCopy | None) -> Command:
    if signed is None:
        return ("HDEL", TENANT_COPIES, name)
    return ("HSET", TENANT_COPIES, name, msgspec.msgpack.encode(signed))
