"""The tenants of other sites that this one may serve. No I/O.

    named and copied ──confirmed──▶ held ──not named any more──▶ removed
                                     └──silence for longer than stale_s──▶ held, and not served

A reply of the home site confirms the copies that it names, from the time at which this site asked:
neither a delay on the way nor the clock of the other site makes a copy look newer than it is.
Whatever a peer sends, it takes at most MAX_COPIES copies of MAX_COPY_BYTES here, under its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from shared.messages import MAX_COPIES, SignedCopy, TenantCopies
from shared.subjects import SITE_SEPARATOR, at_site, is_at_site
from shared.tenancy.deletion.kv_drops import DropReason
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_copy import CopyRejected, TenantCopy, opened_copy


@dataclass(slots=True)
class CopiedTenant:
    """A tenant of another site. `tenant` is its record under the name that it has here.
    `confirmed_at` is a time of this process's clock, -inf before the first confirmation.
    """

    copy: TenantCopy
    tenant: TenantRecord
    confirmed_at: float = -inf


@dataclass(slots=True)
class CopyChanges:
    """What one reply has changed, by the tenants' names here, and why copies were rejected.
    `stored` has None for a copy that is gone. `due` are the tenants of whom nothing may be here of
    the time before: they are gone, or later ones of their names, or have zero retention now.
    """

    stored: dict[str, SignedCopy | None] = field(default_factory=dict)
    due: dict[str, DropReason] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)


class CopiedTenants:
    def __init__(
        self, site: str, may_hold: Callable[[TenantRecord], bool] = lambda record: True
    ) -> None:
        """`site` is the name of this site, which `may_hold` data of a tenant, or not even its
        record.
        """
        self.num_rejected = 0
        self._may_hold = may_hold
        self._site = site
        self._by_home: dict[str, dict[str, CopiedTenant]] = {}
        self._by_digest: dict[str, CopiedTenant] = {}

    def find(self, key_digest: str) -> CopiedTenant | None:
        """Returns the tenant of a valid key, whether or not it is confirmed."""
        return self._by_digest.get(key_digest)

    def named(self, name: str) -> CopiedTenant | None:
        """Returns the tenant whose name here is `{home}/{tenant}`."""
        home, _, tenant_id = name.partition(SITE_SEPARATOR)
        return self._by_home.get(home, {}).get(tenant_id)

    def latest(self, tenant: TenantRecord) -> TenantRecord | None:
        """Returns the record that a tenant of another site has by now; None: it is not here any
        more, but maybe a later one of its name. That of a tenant of this site is in Redis, and is
        returned as it is given.
        """
        if not is_at_site(tenant.tenant_id):
            return tenant
        found = self.named(tenant.tenant_id)
        is_gone = found is None or found.tenant.created_at != tenant.created_at
        return None if found is None or is_gone else found.tenant

    def versions(self, home: str) -> tuple[tuple[str, int], ...]:
        """Returns the tenants of a site, and the versions of their copies."""
        held = self._by_home.get(home, {})
        return tuple((name, each.copy.version) for name, each in held.items())

    def confirmations(self) -> dict[str, list[float]]:
        """Returns by home site when each of its tenants was confirmed. Any thread may call it."""
        return {
            home: [each.confirmed_at for each in held.copy().values()]
            for home, held in self._by_home.copy().items()
        }

    def restore(self, home: str, signed: SignedCopy, key: bytes) -> None:
        """Takes a copy that was stored before this process started: it is not confirmed. Raises
        CopyRejected.
        """
        self._install(home, opened_copy(signed, key))

    def take(self, home: str, reply: TenantCopies, asked_at: float) -> CopyChanges:
        """Takes a reply of the site `home`, whose `key` the caller trusts."""
        changes = CopyChanges()
        named = dict(reply.versions)
        for name in [each for each in self._by_home.get(home, ()) if each not in named]:
            gone = self._remove(home, name).tenant.tenant_id
            changes.stored[gone], changes.due[gone] = None, "removed"
        for signed in reply.copies:
            try:
                copy = opened_copy(signed, reply.key)
                if named.get(copy.record.tenant_id) != copy.version:
                    raise CopyRejected(f"site {home} sent a copy that it does not name")
                reason = self._reason_to_drop(home, copy.record)
                name = self._install(home, copy)
                changes.stored[name] = signed
                if reason is not None:
                    changes.due[name] = reason
            except CopyRejected as error:
                changes.rejected.append(str(error))
        for name, each in self._by_home.get(home, {}).items():
            if named[name] == each.copy.version:
                each.confirmed_at = max(each.confirmed_at, asked_at)
        self.num_rejected += len(changes.rejected)
        return changes

    def _reason_to_drop(self, home: str, record: TenantRecord) -> DropReason | None:
        """Returns why nothing may be here of the time before a new record. Data of an unknown
        tenant is of an earlier time.
        """
        held = self._by_home.get(home, {}).get(record.tenant_id)
        if held is not None and held.tenant.created_at != record.created_at:
            return "removed"
        had_retention = held is None or not held.tenant.is_zero_retention
        return "zero_retention" if had_retention and record.is_zero_retention else None

    def _install(self, home: str, copy: TenantCopy) -> str:
        """Returns the tenant's name here. Raises CopyRejected."""
        name, held = copy.record.tenant_id, self._by_home.setdefault(home, {})
        if copy.home != home:
            raise CopyRejected(f"site {home} sent a copy of a tenant of site {copy.home!r}")
        if copy.site != self._site:
            raise CopyRejected(f"site {home} sent a copy of {name!r} for site {copy.site!r}")
        before = held.get(name)
        if not self._may_hold(copy.record):
            raise CopyRejected(f"site {home} sent a copy of {name!r}, which may not be here")
        if before is not None and copy.version < before.copy.version:
            raise CopyRejected(f"site {home} sent an older copy of {name!r} than it had sent")
        if before is None and len(held) >= MAX_COPIES:
            raise CopyRejected(f"site {home} has more than {MAX_COPIES} tenants for this one")
        owners = map(self._by_digest.get, copy.key_digests)
        if any(owner not in (None, before) for owner in owners):
            raise CopyRejected(f"site {home} sent a copy of {name!r} with another tenant's key")
        if before is not None:
            self._remove(home, name)
        tenant = structs.replace(copy.record, tenant_id=at_site(home, name))
        made = CopiedTenant(copy, tenant)
        self._by_home.setdefault(home, {})[name] = made
        self._by_digest.update(dict.fromkeys(copy.key_digests, made))
        return tenant.tenant_id

    def _remove(self, home: str, name: str) -> CopiedTenant:
        removed = self._by_home[home].pop(name)
        for digest in set(removed.copy.key_digests):
            del self._by_digest[digest]
        return removed
