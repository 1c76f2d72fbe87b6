"""Removes a tenant, and waits until workers have dropped its KV."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from services.cli.output import with_store
from shared.store import Store
from shared.tenancy.deletion import kv_drops, retractions
from shared.tenancy.deletion.kv_drops import OrderedDrop
from shared.tenancy.deletion.tenant_removal import TenantRemoval

POLL_S = 0.1
BEGIN_S = 1.5  # until an index begins, if one runs
FINISH_S = 10.0
SETTLE_S = 1.5  # gateways write the usage of ended requests


def remove_tenant(tenant_id: str, redis_url: str | None, *, with_usage: bool) -> None:
    """Removes a tenant. Raises ConfigError for one that does not exist, StoreUnavailable."""

    async def remove(store: Store) -> OrderedDrop | None:
        removal = TenantRemoval(store, time.time, retractions.file_of(os.environ))
        drop = await removal.remove(tenant_id, with_usage=with_usage)
        found = await _awaited(store, drop.number)
        if found is not None and found.progress is not None:  # else nothing runs
            await asyncio.sleep(SETTLE_S)
        await removal.finish(drop)
        return found

    _print_note(tenant_id, with_store(redis_url, remove))


def note_dropped_kv(tenant_id: str, redis_url: str | None) -> None:
    """Waits for the last order to drop a tenant's KV, and prints a note about it. Raises
    StoreUnavailable.
    """

    async def wait(store: Store) -> OrderedDrop | None:
        found = await kv_drops.orders(store)
        own = [each.drop.number for each in found if each.drop.tenant_id == tenant_id]
        return await _awaited(store, own[-1]) if own else None

    _print_note(tenant_id, with_store(redis_url, wait))


async def _awaited(store: Store, number: int) -> OrderedDrop | None:
    """Returns how far an order is once it has finished, no index has begun, or FINISH_S have
    passed; None if it is forgotten.
    """
    began_at = time.monotonic()
    while True:
        found = {each.drop.number: each for each in await kv_drops.orders(store)}.get(number)
        if found is None or found.is_finished:
            return found
        limit_s = BEGIN_S if found.progress is None else FINISH_S
        if time.monotonic() - began_at > limit_s:
            return found
        await asyncio.sleep(POLL_S)


def _print_note(tenant_id: str, found: OrderedDrop | None) -> None:
    if found is None:
        return
    progress, where = found.progress, f"`hearth tenant show {tenant_id} --where`"
    if progress is None:
        note = f"no index follows the order to drop cached KV yet: see {where}"
    elif not found.is_finished:
        note = f"KV is still on {', '.join(progress.waiting) or 'workers'}: see {where}"
    else:
        note = f"{progress.num_workers} workers dropped {progress.num_blocks} cached blocks"
    print(f"note: {note}", file=sys.stderr)
