"""The names under which a site caches and records what it holds of another site's tenants. No I/O.

    {site}/{tenant}    the first MAX_NAMED tenants of a site, while the process runs
    {site}/+{number}   all others: the number follows from the tenant's name. No id begins with +

Each process has other first tenants, so what is held of one may be under both names. An order to
drop it names the tenant, and reaches both; under the shared name it costs others what is cached.
"""

from __future__ import annotations

from hashlib import blake2b

from shared.subjects import at_site, is_at_site, site_in

MAX_NAMED = 1000  # tenants of one site with names of their own
NUM_SHARED = 256  # names of one site that the others share


def shared_name(tenant_id: str) -> str:
    """Returns the name that a tenant `{site}/{tenant}` shares with others of its site."""
    digest = blake2b(tenant_id.encode(), digest_size=8).digest()
    return at_site(site_in(tenant_id) or "", f"+{int.from_bytes(digest) % NUM_SHARED}")


def names_of(tenant_id: str) -> tuple[str, ...]:
    """Returns all names under which anything of a tenant may be held. One of this site has its
    own alone.
    """
    return (tenant_id, shared_name(tenant_id)) if is_at_site(tenant_id) else (tenant_id,)


class SiteTenantNames:
    """The names that one process gives to the tenants of one other site."""

    def __init__(self, max_named: int = MAX_NAMED) -> None:
        self._max_named = max_named
        self._named: set[str] = set()

    def of(self, tenant_id: str) -> str:
        """Returns the name of a tenant `{site}/{tenant}`: its own, or a shared one."""
        if tenant_id not in self._named:
            if len(self._named) >= self._max_named:
                return shared_name(tenant_id)
            self._named.add(tenant_id)
        return tenant_id
