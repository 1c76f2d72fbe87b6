"""`hearth tenant show --where`: what of a tenant lies where."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import msgspec
from rich.console import RenderableType

from services.cli.fleet.find_worker import LISTEN_S
from services.cli.nats_address import find_nats
from services.cli.output import plain_table, print_json, show, time_text, with_store
from services.local.credentials import process_id_for
from shared.errors import ConfigError, HearthError
from shared.fleet.kv_elsewhere import KvElsewhere, ReadKvElsewhere, SiteKv
from shared.messages import CountTenantKv, Heartbeat, TenantKvCounted
from shared.sites.tenant_names import names_of
from shared.store import Store
from shared.subjects import HEARTBEATS, READ_KV_ELSEWHERE, tenant_kv
from shared.telemetry.log import configure_logging
from shared.tenancy.deletion.tenant_removal import TenantRemoval, Whereabouts
from shared.tenancy.site_admin import copied_tenant, is_copied, linked_sites
from shared.tenancy.tenant import tenant_of
from shared.tls import TlsFiles
from shared.transport.bus import Bus, NatsBus

COUNT_TIMEOUT_S = 2.0
SITES_TIMEOUT_S = 5.0  # of a gateway, which asks all linked sites


class WorkerKv(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a tenant's KV on a worker: cached ones, and those of requests that run.
    `shared_tokens` are under a name that a tenant of another site may share with others of that
    site. `problem` says why they are not known.
    """

    worker: str
    region: str = ""
    cached_tokens: int = 0
    held_tokens: int = 0
    shared_tokens: int = 0
    problem: str = ""


class KvAtSite(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The same, of all workers of a linked site."""

    site: str
    region: str = ""
    cached_tokens: int = 0
    held_tokens: int = 0
    shared_tokens: int = 0
    workers: int = 0
    problem: str = ""


def show_where(
    tenant_id: str, redis_url: str | None, nats_url: str | None, *, is_json: bool
) -> None:
    """Prints what of a tenant, or of a removed one, lies where. Raises ConfigError,
    StoreUnavailable, DependencyUnavailable.
    """
    found, linked = with_store(redis_url, lambda store: _whereabouts(store, tenant_id))
    configure_logging("tenant", level="error")  # not that the connection has been closed
    workers, sites = asyncio.run(_ask(find_nats(nats_url, "operator"), tenant_id, linked))
    if is_json:
        drops = [each.drop for each in found.drops]
        rows = {"records": found.records, "workers": workers, "copies": found.sites}
        print_json({"tenant": tenant_id, **rows, "sites": sites, "unfinished": drops})
        return
    show(*_tables(tenant_id, found, workers, sites))


async def _whereabouts(store: Store, tenant_id: str) -> tuple[Whereabouts, list[str]]:
    """Returns what this site holds, and the sites that may hold KV, too."""
    if is_copied(tenant_id):  # its home site asks the others
        await copied_tenant(store, tenant_id)
        return await TenantRemoval(store, time.time).whereabouts(tenant_id, ()), []
    record = await tenant_of(store, tenant_id)
    sites = () if record is None else record.sites
    found = await TenantRemoval(store, time.time).whereabouts(tenant_id, sites)
    if record is None and not any(found.records.values()) and not found.drops:
        raise ConfigError(f"tenant {tenant_id!r} does not exist, and nothing is recorded of it")
    return found, await linked_sites(store)


async def _ask(
    nats_url: str, tenant_id: str, linked: Sequence[str]
) -> tuple[list[WorkerKv], list[KvAtSite]]:
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_for("operator", nats_url),
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        workers, sites = count_kv(bus, tenant_id), count_at_sites(bus, tenant_id, linked)
        return await asyncio.gather(workers, sites)
    finally:
        await bus.close()


async def count_kv(bus: Bus, tenant_id: str) -> list[WorkerKv]:
    """Returns what each worker that is heard within LISTEN_S holds, by its name."""
    heard: dict[str, Heartbeat] = {}
    leave = await bus.subscribe(HEARTBEATS, Heartbeat, lambda it: heard.update({it.process_id: it}))
    await asyncio.sleep(LISTEN_S)
    await leave()
    workers = [each for _, each in sorted(heard.items()) if each.load is not None]
    return list(await asyncio.gather(*(_count(bus, each, tenant_id) for each in workers)))


async def _count(bus: Bus, worker: Heartbeat, tenant_id: str) -> WorkerKv:
    name, region = worker.process_id, worker.region
    subject = tenant_kv(worker.roles[0], name)
    counting = (
        bus.request(
            subject, CountTenantKv(tenant_id=each), TenantKvCounted, timeout_s=COUNT_TIMEOUT_S
        )
        for each in names_of(tenant_id)
    )
    try:
        own, *shared = await asyncio.gather(*counting)
    except HearthError as error:
        return WorkerKv(worker=name, region=region, problem=error.message)
    return WorkerKv(
        worker=name,
        region=region,
        cached_tokens=own.num_cached_tokens,
        held_tokens=own.num_held_tokens,
        shared_tokens=sum(each.num_cached_tokens + each.num_held_tokens for each in shared),
    )


async def count_at_sites(bus: Bus, tenant_id: str, linked: Sequence[str]) -> list[KvAtSite]:
    """Returns what each of the sites in `linked`, and those heard since, holds, by its name."""
    if not linked:
        return []
    command = ReadKvElsewhere(tenant_id=tenant_id)
    try:
        reply = await bus.request(
            READ_KV_ELSEWHERE, command, KvElsewhere, timeout_s=SITES_TIMEOUT_S
        )
    except HearthError as error:
        return [KvAtSite(site=each, problem=error.message) for each in linked]
    found = {each.site: _at_site(each) for each in reply.sites}
    problem = f"gateway {reply.gateway_id} has not heard it since its start"
    away = {each: KvAtSite(site=each, problem=problem) for each in linked}
    return [each for _, each in sorted((away | found).items())]


def _at_site(found: SiteKv) -> KvAtSite:
    kv = found.kv
    if kv is None:
        return KvAtSite(site=found.site, region=found.region, problem=found.problem)
    unknown = kv.num_unknown_workers
    return KvAtSite(
        site=found.site,
        region=found.region,
        cached_tokens=kv.num_cached_tokens,
        held_tokens=kv.num_held_tokens,
        shared_tokens=kv.num_shared_tokens,
        workers=kv.num_workers,
        problem=f"{unknown} of {kv.num_workers} workers did not reply" if unknown else "",
    )


def _tables(
    tenant_id: str, found: Whereabouts, workers: Sequence[WorkerKv], sites: Sequence[KvAtSite]
) -> list[RenderableType]:
    records = plain_table(f"{tenant_id}: in Redis", "records")
    for kind, count in found.records.items():
        records.add_row(kind, f"{count:,}")
    on_workers = plain_table(
        "worker", "region", "cached tokens", "of running requests", "not known"
    )
    for each in workers:
        counts = ("", "") if each.problem else (f"{each.cached_tokens:,}", f"{each.held_tokens:,}")
        on_workers.add_row(each.worker, each.region, *counts, _unknown(each))
    at_sites = plain_table("site", "region", "cached tokens", "of running requests", "not known")
    for at in sites:
        is_known = at.workers or not at.problem
        counts = (f"{at.cached_tokens:,}", f"{at.held_tokens:,}") if is_known else ("", "")
        at_sites.add_row(at.site, at.region, *counts, _unknown(at))
    copies = ", ".join(found.sites) or "none"
    parts: list[RenderableType] = [
        records,
        "",
        on_workers,
        "",
        *((at_sites, "") if sites else ()),
        f"sites with a copy of its record: {copies}",
    ]
    for order in found.drops:
        waiting = () if order.progress is None else order.progress.waiting
        since = time_text(order.drop.ordered_at)
        parts.append(f"ordered to drop its KV {since}, not finished: {', '.join(waiting)}")
    return parts


def _unknown(at: WorkerKv | KvAtSite) -> str:
    shared = f"{at.shared_tokens:,} tokens of this or other tenants" if at.shared_tokens else ""
    return "; ".join(filter(None, (at.problem, shared)))
