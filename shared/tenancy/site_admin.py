"""What operators see and change of tenants over sites, beside the tenants themselves."""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import ConfigError
from shared.store import Store
from shared.subjects import SITE_SEPARATOR
from shared.tenancy.declared_classes import declared_classes
from shared.tenancy.residency import advice_to_declare, class_on_bus
from shared.tenancy.tenant import TENANT_COPIES, TenantRecord
from shared.tenancy.tenant_copy import SITE_KEYS, SITES, decoded_copy


async def linked_sites(store: Store) -> list[str]:
    """Returns all sites that a gateway has ever heard, sorted. Raises StoreUnavailable."""
    return sorted(each.decode() for each in await store.hash_get(SITES))


async def check_sites(store: Store, sites: Iterable[str]) -> None:
    """Raises ConfigError for a site that no gateway has heard over a link, and StoreUnavailable."""
    linked = await linked_sites(store)
    for site in sites:
        if site not in linked:
            known = f"linked are {', '.join(linked)}" if linked else "this site has no links yet"
            raise ConfigError(f"no gateway has heard a site {site!r} over a link: {known}")


async def check_bounds(store: Store, record: TenantRecord) -> None:
    """Raises ConfigError for a tenant that gateways of a linked site refuse: one with allowed
    regions that are those of no class. Raises StoreUnavailable.
    """
    regions = record.allowed_regions
    if not regions or record.region_class or not await store.hash_get(SITES):
        return
    if not class_on_bus(record, await declared_classes(store)):
        raise ConfigError(advice_to_declare(regions))


async def copied_tenants(store: Store) -> dict[str, TenantRecord | None]:
    """Returns the records of other sites' tenants by their names here, sorted; None for an
    unreadable one. Raises StoreUnavailable.
    """
    found = await store.hash_get(TENANT_COPIES)
    return {
        name.decode(): decoded_copy(name.decode(), data) for name, data in sorted(found.items())
    }


def is_copied(tenant_id: str) -> bool:
    return SITE_SEPARATOR in tenant_id


async def copied_tenant(store: Store, tenant_id: str) -> TenantRecord:
    """Returns the record of another site's tenant. Raises ConfigError, StoreUnavailable."""
    record = (await copied_tenants(store)).get(tenant_id)
    if record is None:
        raise ConfigError(f"no copy of the tenant {tenant_id!r}: see `hearth tenant list`")
    return record


async def forget_site_key(store: Store, site: str) -> None:
    """Makes gateways take the next key that a site shows. Raises ConfigError, StoreUnavailable."""
    if site.encode() not in await store.hash_get(SITE_KEYS):
        raise ConfigError(f"no key of a site {site!r} is known: there is nothing to forget")
    await store.write([("HDEL", SITE_KEYS, site)])
