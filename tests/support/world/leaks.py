"""Lists what an idle process still holds."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

from services.kv_index.index import SyncState
from services.kv_index.registry import HOLDER
from services.scheduler.service import SchedulerService
from shared.tenancy.prefixes.pinned_prefix import record_key

if TYPE_CHECKING:
    from services.kv_index.index import PrefixIndex
    from services.kv_index.service import KvIndexService
    from tests.support.world.store import MemoryStore
    from tests.support.world.workers import SimulatedWorker


def not_empty(**collections: Sized) -> list[str]:
    return [f"{name}: {len(held)}" for name, held in collections.items() if len(held)]


def of_worker(worker: SimulatedWorker) -> list[str]:
    engine, pool = worker.engine, worker.engine.pool
    pool.check()
    found = not_empty(
        waiting=engine.batcher.waiting,
        running=engine.batcher.running,
        reserved=engine._reserved,
        held=engine._held,
        computing_pins=worker.worker.pins._computing,
    )
    if pool.num_free_blocks != pool.num_blocks:
        found.append(f"blocks: {pool.num_blocks - pool.num_free_blocks} of {pool.num_blocks}")
    if worker.receiver.num_expected:
        found.append(f"expected pushes: {worker.receiver.num_expected}")
    if worker.prefill is not None:
        found += not_empty(prefills=worker.prefill._prefills)
    decode = worker.decode
    if decode is not None:
        found += not_empty(
            placements=decode._placements,
            ended=decode._ended,
            output_buffer=decode._output_buffer,
            unsent_entries=decode._output_buffer._updates,
            unfinished=decode._unfinished,
            handoffs=decode._active_handoffs._under_way,
        )
    return found


def of_scheduler(service: SchedulerService) -> list[str]:
    queues = service._queues
    return not_empty(
        queued=queues._held,
        queues=[each for each in queues._backlogs.values() if each.usage.num_requests],
        by_gateway=queues._of_gateway,
        usage=queues._usage_of_tenant,
        unserved=service._unserved,
        placing=service._placing,
        sending=service._sending,
        assignments=[
            each for known in service._workers._known.values() for each in known.assignments
        ],
    ) + ([f"queued tokens: {queues.num_tokens}"] if queues.num_tokens else [])


def of_registry(service: KvIndexService, store: MemoryStore, *, is_only_writer: bool) -> list[str]:
    """Records missing from Redis, and records that should not be there.

    Replicas record other blocks of a run, depending on when they learned of them. What another
    process alone has recorded stays in Redis until the record is read again, or expires.
    """
    registry = service._registry
    found = not_empty(unwritten=registry._pending)
    found += [
        f"{worker_id} does not hold {block_hash.hex()}"
        for worker_id, held in registry._held_by.items()
        for block_hash in held
        if not service.indexes.holds(worker_id, block_hash)
    ]
    for record in registry._records.values():
        written = store.data.get(record_key(record.tenant_id, record.block_hash), {})
        holders = {name.decode() for name in written if name.startswith(b"holder:")}
        own = {HOLDER + worker_id for worker_id in record.holders}
        if own - holders or (is_only_writer and holders != own):
            found.append(f"Redis knows other holders of {record.block_hash.hex()}")
    return found


def of_index(index: PrefixIndex, workers: list[SimulatedWorker]) -> list[str]:
    """Differences between the index and the workers' pools."""
    found = []
    for worker in workers:
        state = index.state_of(worker.worker_id)
        if state is not SyncState.EXACT:
            found.append(f"{worker.worker_id}'s cache is {state}")
            continue
        bit = 1 << index._workers[worker.worker_id].slot
        for group, ids_of in enumerate(worker.engine.pool._block_ids):
            masks = index._holders[group]
            known = {each for each in masks.hashes() if masks.get(each) & bit}
            held = ids_of.keys()
            if known != held:
                found.append(
                    f"{worker.worker_id}: {len(held - known)} of {len(held)} blocks of group "
                    f"{group} unknown, {len(known - held)} known ones not there"
                )
    return found
