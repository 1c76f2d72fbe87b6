"""Records of each tenant's cached prefixes in Redis, written asynchronously (write-behind).

    hearth:{tenant}:prefix:{hash}   model, revision, num_tokens, bytes, hits, saved_tokens,
                                    last_use, pin (a name, or empty), one holder:{worker} per holder
    hearth:{tenant}:prefixes        the hashes by last use; the oldest beyond the bound are deleted

The tip (last block) of each run of blocks that a worker stores gets one record. A growing output
stores one run per block: of the runs between two batches only the last gets a record, besides the
record of its prompt. Changes are collected here, coalesced by record, and `flush` sends them in one
batch; no match or event waits for Redis. While Redis is unavailable, the oldest changes beyond a
bound are dropped, and counted. A count of 0 is not written.

Several replicas write the same records. Each holder is a separate field, hits are increments, and
`trim` reads the oldest records from Redis, so no replica overwrites another's data. `recover` reads
records from before the start of a replica, once for each tenant that the replica meets.

The record of a dropped tenant is deleted with its last holder or pin: a worker that follows the
order late has reported what it held before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from shared.background import failing_alone
from shared.block_hash import PUBLIC_TENANT_ID
from shared.packing import BLOCK_HASH_BYTES, unpack_hashes
from shared.store import Command, Store, StoreRejected, StoreUnavailable
from shared.tenancy.deletion.tenant_data import prefix_records_of
from shared.tenancy.prefixes.pinned_prefix import record_key

log = structlog.get_logger(__name__)

MAX_PENDING = 20_000
MAX_PER_FLUSH = 100  # bounds one batch to a few milliseconds of Redis
MAX_PARTS = 1000  # arguments of one command
MAX_TENANTS = 1_000  # tenants in memory; records of others stay in Redis until they expire
HOLDER = "holder:"

T = TypeVar("T")
MayHold = Callable[[str, bytes], bool]  # arguments: a worker and a block hash


@dataclass(slots=True, eq=False)
class PrefixRecord:
    tenant_id: str
    block_hash: bytes
    model: str
    revision: str
    num_tokens: int
    num_bytes: int
    last_use: int
    holders: set[str] = field(default_factory=set)
    pin: str = ""
    extends: bool = False  # the run continues another record's tip
    is_over: bool = False  # to be deleted
    written_at: float = 0.0
    # not yet in Redis: whether it was used, holders added (True) or removed (False), increments
    is_used: bool = False
    new_holders: dict[str, bool] = field(default_factory=dict)
    new_hits: int = 0
    new_saved_tokens: int = 0

    def hold(self, worker_id: str, *, is_held: bool) -> None:
        (self.holders.add if is_held else self.holders.discard)(worker_id)
        self.new_holders[worker_id] = is_held


@dataclass(frozen=True, slots=True)
class _Delta:
    """The changes of one record in a batch."""

    record: PrefixRecord
    is_used: bool
    holders: Mapping[str, bool]
    hits: int
    saved_tokens: int


class PrefixRegistry:
    """Records prefixes in Redis. `now` returns unix seconds: records outlive this process,
    monotonic time does not.
    """

    def __init__(
        self,
        store: Store,
        now: Callable[[], float],
        *,
        max_per_tenant: int,
        ttl_s: int,
        max_pending: int = MAX_PENDING,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        self.num_dropped = 0
        self._store = store
        self._now = now
        self._max_per_tenant = max_per_tenant
        self._ttl_s = ttl_s
        self._max_pending = max_pending
        self._max_tenants = max_tenants
        self._records: dict[bytes, PrefixRecord] = {}
        self._by_tenant: OrderedDict[str, OrderedDict[bytes, PrefixRecord]] = OrderedDict()
        self._held_by: dict[str, set[bytes]] = {}
        self._pinned: dict[bytes, PrefixRecord] = {}
        self._pending: OrderedDict[bytes, PrefixRecord] = OrderedDict()
        self._to_recover: OrderedDict[str, None] = OrderedDict()
        self._to_trim: dict[str, None] = {}
        self.dropped: frozenset[str] = frozenset()  # tenants whose KV workers have to drop

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def stored(
        self,
        worker_id: str,
        *,
        tenant_id: str,
        model: str,
        revision: str,
        num_tokens: int,
        num_bytes: int,
        parent_hash: bytes,
        tip_hash: bytes,
    ) -> None:
        """Records a run of blocks. `parent_hash` is the hash of the block before the run,
        `tip_hash` of the last block.
        """
        record = self._records.get(tip_hash)
        if record is None:
            before = self._records.get(parent_hash)
            record = PrefixRecord(tenant_id, tip_hash, model, revision, num_tokens, num_bytes, 0)
            self._records[tip_hash] = record
            if before is not None and before.tenant_id == tenant_id:
                record.extends = True
                self._give_way(before, worker_id)
        record.hold(worker_id, is_held=True)
        self._held_by.setdefault(worker_id, set()).add(tip_hash)
        self._use(record)

    def removed(self, worker_id: str, block_hashes: bytes) -> None:
        held = self._held_by.get(worker_id)
        if not held:
            return
        for block_hash in [each for each in unpack_hashes(block_hashes) if each in held]:
            held.discard(block_hash)
            self._release(worker_id, block_hash)

    def cleared(self, worker_id: str) -> None:
        """Releases all blocks of a worker that is lost, or whose cache was emptied."""
        for block_hash in self._held_by.pop(worker_id, set()):
            self._release(worker_id, block_hash)

    def checked(self, worker_id: str, is_held: Callable[[bytes], bool]) -> None:
        """Releases recorded blocks that the worker, known exactly again, no longer holds."""
        held = self._held_by.get(worker_id, set())
        for block_hash in sorted(each for each in held if not is_held(each)):
            held.discard(block_hash)
            self._release(worker_id, block_hash)

    def matched(self, tenant_id: str, block_hashes: Sequence[bytes], num_blocks: int) -> None:
        """Counts a hit on the deepest known tip among the first `num_blocks`, and on every pinned
        tip, if the tip is the tenant's or public.
        """
        records, found = self._records, block_hashes[:num_blocks]
        deepest = next((records[each] for each in reversed(found) if each in records), None)
        if deepest is None:
            return
        hits = [self._pinned[each] for each in found if each in self._pinned]
        if deepest not in hits:
            hits.append(deepest)
        for record in hits:
            if record.tenant_id in (tenant_id, PUBLIC_TENANT_ID):
                record.new_hits += 1
                record.new_saved_tokens += record.num_tokens
                self._use(record)

    def pin(self, record: PrefixRecord) -> None:
        """Pins a record under the name `record.pin`; a known record retains its counts. Repeated
        calls prevent the record from expiring.
        """
        known = self._records.setdefault(record.block_hash, record)
        is_new = known.pin != record.pin or record.block_hash not in self._pinned
        if not is_new and self._now() - known.written_at < self._ttl_s / 2:
            return
        known.pin = record.pin
        self._pinned[record.block_hash] = known
        self._use(known)

    def unpin(self, block_hash: bytes) -> None:
        record = self._pinned.pop(block_hash, None)
        if record is not None:
            record.pin = ""
            if not self._end_if_dropped(record):
                self._use(record)

    def drop_tenant(self, tenant_id: str) -> None:
        """Forgets all records of a tenant, and their changes; `tenant_data` deletes those in
        Redis.
        """
        own = dict(self._by_tenant.pop(tenant_id, {}))
        own |= {key: each for key, each in self._pinned.items() if each.tenant_id == tenant_id}
        self._to_recover.pop(tenant_id, None)
        for record in own.values():
            self._pinned.pop(record.block_hash, None)
            self._forget(record)
        # also of those that had to leave memory; deletions are still to be sent
        changed = (each for each in self._pending.values() if each.tenant_id == tenant_id)
        for record in [each for each in changed if not each.is_over]:
            del self._pending[record.block_hash]

    # ── write-behind ─────────────────────────────────────────────────────────────────────────────

    async def flush(self) -> bool:
        """Sends one batch. Returns False if Redis is unavailable; then no change is lost."""
        count = min(len(self._pending), MAX_PER_FLUSH)
        batch = [self._taken() for _ in range(count)]
        if not batch:
            return True
        try:
            await self._store.write(self._commands(batch))
        except StoreRejected as error:  # other commands are done, and must not run twice
            log.warning("prefix_records_rejected", reason=str(error))
        except StoreUnavailable:
            self._restore(batch)
            return False
        self._to_trim |= dict.fromkeys(delta.record.tenant_id for delta in batch)
        return True

    async def trim(self) -> None:
        """Deletes the oldest records of tenants above the bound, whichever replica wrote them."""
        tenants, self._to_trim = self._to_trim, {}
        while tenants:
            tenant_id, _ = tenants.popitem()
            with failing_alone("prefix_records_not_trimmed", tenant=tenant_id):
                try:
                    await self._trim(tenant_id)
                except StoreUnavailable:
                    self._to_trim |= {**tenants, tenant_id: None}
                    return

    async def _trim(self, tenant_id: str) -> None:
        key = prefix_records_of(tenant_id)
        num_over = await self._store.sorted_set_size(key) - self._max_per_tenant
        if num_over <= 0:
            return
        pinned = {each.block_hash.hex().encode() for each in self._pinned.values()}
        num_removed = min(num_over, MAX_PER_FLUSH)
        # pinned ones may be the oldest: without looking behind them nothing would be deleted
        oldest = await self._store.sorted_set_head(key, num_removed + len(pinned))
        removed = [name for name in oldest if name not in pinned][:num_removed]
        if removed:
            hashes = filter(None, map(_hash_of, removed))
            deletions = [("DEL", record_key(tenant_id, each)) for each in hashes]
            await self._store.write([*deletions, ("ZREM", key, *removed)])

    def _commands(self, batch: Sequence[_Delta]) -> list[Command]:
        """Returns the Redis commands of a batch. Logs and omits records whose encoding raises."""
        commands: list[Command] = []
        sets: dict[str, Command] = {}
        for delta in batch:
            tenant_id = delta.record.tenant_id
            with failing_alone("prefix_record_not_written", tenant=tenant_id):
                commands += list(self._record_commands(delta))  # all of them, or none
                sets[tenant_id] = ("EXPIRE", prefix_records_of(tenant_id), self._ttl_s)
        return [*commands, *sets.values()]

    def _record_commands(self, delta: _Delta) -> Iterable[Command]:
        record, key = delta.record, record_key(delta.record.tenant_id, delta.record.block_hash)
        member, all_records = record.block_hash.hex(), prefix_records_of(record.tenant_id)
        if record.is_over:
            yield ("DEL", key)
            yield ("ZREM", all_records, member)
            return
        release = [HOLDER + each for each, is_held in delta.holders.items() if not is_held]
        for names in _in_chunks(release, MAX_PARTS):
            yield ("HDEL", key, *names)
        if not delta.is_used:  # a deleted record must not be recreated
            return
        fields: dict[str, str | int] = {
            "model": record.model,
            "revision": record.revision,
            "num_tokens": record.num_tokens,
            "bytes": record.num_bytes,
            "last_use": record.last_use,
            "pin": record.pin,
        }
        fields |= {HOLDER + each: 1 for each, is_held in delta.holders.items() if is_held}
        for pairs in _in_chunks(list(fields.items()), MAX_PARTS // 2):
            yield ("HSET", key, *(item for pair in pairs for item in pair))
        if delta.hits:
            yield ("HINCRBY", key, "hits", delta.hits)
            yield ("HINCRBY", key, "saved_tokens", delta.saved_tokens)
        yield ("EXPIRE", key, self._ttl_s)
        yield ("ZADD", all_records, "GT", record.last_use, member)

    def _restore(self, batch: Sequence[_Delta]) -> None:
        """Returns an unsent batch to the pending changes, before all newer changes."""
        for delta in reversed(batch):
            record = delta.record
            if self._is_dropped(record):
                continue
            record.is_used |= delta.is_used
            record.new_hits += delta.hits
            record.new_saved_tokens += delta.saved_tokens
            record.new_holders = {**delta.holders, **record.new_holders}
            if record.block_hash not in self._pending:
                self._pending[record.block_hash] = record
                self._pending.move_to_end(record.block_hash, last=False)
        self._bound_pending()

    def _is_dropped(self, record: PrefixRecord) -> bool:
        """Whether the tenant was dropped while the batch was on its way."""
        is_known = record.is_over or record.block_hash in self._records
        return record.tenant_id in self.dropped and not is_known

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────

    async def recover(self, may_hold: MayHold) -> None:
        """Reads the records of newly met tenants from Redis, so that hits count on prefixes whose
        tips this process has not seen stored. Removes holders that cannot hold the block.
        """
        while self._to_recover:
            tenant_id = next(iter(self._to_recover))
            with failing_alone("prefix_records_not_recovered", tenant=tenant_id):
                try:
                    await self._recover(tenant_id, may_hold)
                except StoreUnavailable:
                    return
            self._to_recover.pop(tenant_id, None)

    async def _recover(self, tenant_id: str, may_hold: MayHold) -> None:
        for name in await self._store.sorted_set_head(
            prefix_records_of(tenant_id), self._max_per_tenant
        ):
            block_hash = _hash_of(name)
            if block_hash is None:
                continue
            fields = await self._store.hash_get(record_key(tenant_id, block_hash))
            record = _record_of(tenant_id, block_hash, fields)
            if record is not None:
                self._take_back(record, may_hold)

    def _take_back(self, stored: PrefixRecord, may_hold: MayHold) -> None:
        record = self._records.get(stored.block_hash)
        prefixes = self._by_tenant.get(stored.tenant_id)
        if record is None:
            if prefixes is None or len(prefixes) >= self._max_per_tenant:
                return
            record = self._records[stored.block_hash] = stored
            prefixes[stored.block_hash] = stored
            prefixes.move_to_end(stored.block_hash, last=False)
        for worker_id in sorted(stored.holders - record.new_holders.keys()):
            if may_hold(worker_id, record.block_hash):
                record.holders.add(worker_id)
                self._held_by.setdefault(worker_id, set()).add(record.block_hash)
            elif worker_id not in record.holders or record is stored:
                record.hold(worker_id, is_held=False)
                self._change(record)

    # ── internals ────────────────────────────────────────────────────────────────────────────────

    def _taken(self) -> _Delta:
        """Removes and returns the oldest pending change."""
        _, record = self._pending.popitem(last=False)
        delta = _Delta(
            record, record.is_used, record.new_holders, record.new_hits, record.new_saved_tokens
        )
        record.is_used, record.new_holders = False, {}
        record.new_hits = record.new_saved_tokens = 0
        record.written_at = self._now()
        return delta

    def _use(self, record: PrefixRecord) -> None:
        record.last_use, record.is_used = int(self._now()), True
        if record.tenant_id not in self._by_tenant:
            self._by_tenant[record.tenant_id] = OrderedDict()
            self._to_recover[record.tenant_id] = None
        prefixes = self._by_tenant[record.tenant_id]
        prefixes[record.block_hash] = record
        prefixes.move_to_end(record.block_hash)
        self._by_tenant.move_to_end(record.tenant_id)
        self._change(record)
        if len(prefixes) > self._max_per_tenant:
            self._forget(prefixes.popitem(last=False)[1])
        if len(self._by_tenant) > self._max_tenants:
            tenant_id, prefixes = self._by_tenant.popitem(last=False)
            self._to_recover.pop(tenant_id, None)
            for each in prefixes.values():
                self._forget(each)

    def _give_way(self, record: PrefixRecord, worker_id: str) -> None:
        """Forgets a record that its only holder has extended, unless written, hit or pinned."""
        is_met = record.written_at or record.new_hits or record.pin
        if record.extends and not is_met and record.holders == {worker_id}:
            self._pending.pop(record.block_hash, None)
            self._by_tenant[record.tenant_id].pop(record.block_hash, None)
            self._forget(record)

    def _release(self, worker_id: str, block_hash: bytes) -> None:
        record = self._records.get(block_hash)
        if record is None:
            return
        record.hold(worker_id, is_held=False)
        if not self._end_if_dropped(record):
            self._change(record)

    def _end_if_dropped(self, record: PrefixRecord) -> bool:
        """Deletes the record of a dropped tenant that nobody holds or pins. Returns whether it
        did.
        """
        if record.tenant_id not in self.dropped or record.holders or record.pin:
            return False
        record.is_over = True
        self._by_tenant.get(record.tenant_id, OrderedDict()).pop(record.block_hash, None)
        self._forget(record)
        self._change(record)
        return True

    def _forget(self, record: PrefixRecord) -> None:
        """Removes the record from memory; in Redis it stays until it is trimmed or expires."""
        if record.block_hash in self._pinned:
            return
        self._records.pop(record.block_hash, None)
        for worker_id in record.holders:
            self._held_by.get(worker_id, set()).discard(record.block_hash)

    def _change(self, record: PrefixRecord) -> None:
        self._pending[record.block_hash] = record
        self._bound_pending()

    def _bound_pending(self) -> None:
        while len(self._pending) > self._max_pending:
            self._taken()
            self.num_dropped += 1
            if self.num_dropped % 1000 == 1:
                log.warning("prefix_changes_dropped", num_dropped=self.num_dropped)


def _record_of(
    tenant_id: str, block_hash: bytes, fields: Mapping[bytes, bytes]
) -> PrefixRecord | None:
    """Returns None if the record is missing or unreadable."""
    try:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        return PrefixRecord(
            tenant_id,
            block_hash,
            text["model"],
            text["revision"],
            int(text["num_tokens"]),
            int(text["bytes"]),
            int(text["last_use"]),
            holders={name.removeprefix(HOLDER) for name in text if name.startswith(HOLDER)},
        )
    except (KeyError, ValueError):
        return None


def _hash_of(name: bytes) -> bytes | None:
    try:
        block_hash = bytes.fromhex(name.decode())
    except ValueError:
        return None
    return block_hash if len(block_hash) == BLOCK_HASH_BYTES else None


def _in_chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
