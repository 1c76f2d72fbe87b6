"""What Redis knows of a tenant's cached prefixes, written behind the index's back.

    hearth:{tenant}:prefix:{hash}   model, revision, num_tokens, holders, hits, last_use
    hearth:{tenant}:prefixes        the hashes by last use; the oldest beyond the bound are deleted

One record for the tip of each run of blocks that a worker stores. Changes gather here, coalesced by
record, and `flush` sends them in one batch; nothing on the way of a match or an event waits for
Redis. While it is away the oldest changes are dropped beyond a bound, and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import structlog

from shared.packing import unpack_hashes
from shared.store import Command, Store, StoreUnavailable

log = structlog.get_logger(__name__)

MAX_PENDING = 20_000
MAX_PER_FLUSH = 500  # bounds one batch to a few milliseconds of Redis
MAX_TENANTS = 1_000  # remembered here; the records of others stay in Redis until they expire


@dataclass(slots=True, eq=False)
class PrefixRecord:
    tenant_id: str
    block_hash: bytes
    model: str
    revision: str
    num_tokens: int
    last_use: int
    holders: set[str] = field(default_factory=set)
    new_hits: int = 0  # not yet in Redis


class PrefixRegistry:
    """`now` gives unix seconds: records outlive this process, monotonic time does not."""

    def __init__(
        self, store: Store, now: Callable[[], float], *, max_per_tenant: int, ttl_s: int
    ) -> None:
        self.num_dropped = 0
        self._store = store
        self._now = now
        self._max_per_tenant = max_per_tenant
        self._ttl_s = ttl_s
        self._records: dict[bytes, PrefixRecord] = {}
        self._by_tenant: OrderedDict[str, OrderedDict[bytes, PrefixRecord]] = OrderedDict()
        self._held_by: dict[str, set[bytes]] = {}
        # By hash: a record to write, or the tenant whose record to delete.
        self._pending: OrderedDict[bytes, PrefixRecord | str] = OrderedDict()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # ── what happens ─────────────────────────────────────────────────────────────────────────────

    def stored(
        self,
        worker_id: str,
        *,
        tenant_id: str,
        model: str,
        revision: str,
        num_tokens: int,
        tip_hash: bytes,
    ) -> None:
        record = self._records.get(tip_hash)
        if record is None:
            record = PrefixRecord(tenant_id, tip_hash, model, revision, num_tokens, 0)
            self._records[tip_hash] = record
        record.holders.add(worker_id)
        self._held_by.setdefault(worker_id, set()).add(tip_hash)
        self._use(record)

    def removed(self, worker_id: str, block_hashes: bytes) -> None:
        held = self._held_by.get(worker_id, set())
        for block_hash in unpack_hashes(block_hashes):
            if block_hash in held:
                held.discard(block_hash)
                self._let_go(worker_id, block_hash)

    def cleared(self, worker_id: str) -> None:
        """The worker is lost, or its cache was emptied."""
        for block_hash in self._held_by.pop(worker_id, set()):
            self._let_go(worker_id, block_hash)

    def checked(self, worker_id: str, is_held: Callable[[bytes], bool]) -> None:
        """All that the worker holds is known again; what it was believed to hold may be gone."""
        held = self._held_by.get(worker_id, set())
        for block_hash in sorted(each for each in held if not is_held(each)):
            held.discard(block_hash)
            self._let_go(worker_id, block_hash)

    def matched(self, tenant_id: str, block_hashes: Sequence[bytes], num_blocks: int) -> None:
        """Counts a hit on the deepest known tip among the first `num_blocks`."""
        for block_hash in reversed(block_hashes[:num_blocks]):
            record = self._records.get(block_hash)
            if record is not None and record.tenant_id == tenant_id:
                record.new_hits += 1
                self._use(record)
                return

    # ── writing behind ───────────────────────────────────────────────────────────────────────────

    async def flush(self) -> bool:
        """Sends one batch; False if Redis is away, in which case nothing is lost."""
        batch = [self._pending.popitem(last=False) for _ in range(self._batch_size())]
        if not batch:
            return True
        hits = {key: each.new_hits for key, each in batch if isinstance(each, PrefixRecord)}
        for _, each in batch:
            if isinstance(each, PrefixRecord):
                each.new_hits = 0
        try:
            await self._store.write(self._commands(batch, hits))
        except StoreUnavailable:
            self._restore(batch, hits)
            return False
        return True

    def _batch_size(self) -> int:
        return min(len(self._pending), MAX_PER_FLUSH)

    def _commands(
        self, batch: Sequence[tuple[bytes, PrefixRecord | str]], hits: dict[bytes, int]
    ) -> list[Command]:
        commands: list[Command] = []
        tenants: dict[str, None] = {}
        for block_hash, change in batch:
            if isinstance(change, str):
                commands.append(("DEL", _key(change, block_hash)))
                commands.append(("ZREM", _set_key(change), block_hash.hex()))
            else:
                commands += self._record_commands(change, hits[block_hash])
                tenants[change.tenant_id] = None
        for tenant_id in tenants:
            key = _set_key(tenant_id)
            commands.append(("ZREMRANGEBYRANK", key, 0, -self._max_per_tenant - 1))
            commands.append(("EXPIRE", key, self._ttl_s))
        return commands

    def _record_commands(self, record: PrefixRecord, num_hits: int) -> list[Command]:
        key = _key(record.tenant_id, record.block_hash)
        fields: dict[str, str | int] = {
            "model": record.model,
            "revision": record.revision,
            "num_tokens": record.num_tokens,
            "holders": ",".join(sorted(record.holders)),
            "last_use": record.last_use,
        }
        pairs = [item for pair in fields.items() for item in pair]
        return [
            ("HSET", key, *pairs),
            ("HINCRBY", key, "hits", num_hits),
            ("EXPIRE", key, self._ttl_s),
            ("ZADD", _set_key(record.tenant_id), record.last_use, record.block_hash.hex()),
        ]

    def _restore(
        self, batch: Sequence[tuple[bytes, PrefixRecord | str]], hits: dict[bytes, int]
    ) -> None:
        """Puts a batch that was not sent before all younger changes."""
        for block_hash, change in reversed(batch):
            if isinstance(change, PrefixRecord):
                change.new_hits += hits[block_hash]
            if block_hash not in self._pending:
                self._pending[block_hash] = change
                self._pending.move_to_end(block_hash, last=False)
        self._bound_pending()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _use(self, record: PrefixRecord) -> None:
        record.last_use = int(self._now())
        prefixes = self._by_tenant.setdefault(record.tenant_id, OrderedDict())
        prefixes[record.block_hash] = record
        prefixes.move_to_end(record.block_hash)
        self._by_tenant.move_to_end(record.tenant_id)
        self._change(record.block_hash, record)
        if len(prefixes) > self._max_per_tenant:
            _, oldest = prefixes.popitem(last=False)
            self._forget(oldest)
            self._change(oldest.block_hash, oldest.tenant_id)
        if len(self._by_tenant) > MAX_TENANTS:
            _, prefixes = self._by_tenant.popitem(last=False)
            for each in prefixes.values():
                self._forget(each)

    def _let_go(self, worker_id: str, block_hash: bytes) -> None:
        record = self._records.get(block_hash)
        if record is not None:
            record.holders.discard(worker_id)
            self._change(block_hash, record)

    def _forget(self, record: PrefixRecord) -> None:
        self._records.pop(record.block_hash, None)
        for worker_id in record.holders:
            self._held_by.get(worker_id, set()).discard(record.block_hash)

    def _change(self, block_hash: bytes, change: PrefixRecord | str) -> None:
        self._pending[block_hash] = change
        self._bound_pending()

    def _bound_pending(self) -> None:
        while len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
            self.num_dropped += 1
            if self.num_dropped % 1000 == 1:
                log.warning("prefix_changes_dropped", num_dropped=self.num_dropped)


def _key(tenant_id: str, block_hash: bytes) -> str:
    return f"hearth:{_key_part(tenant_id)}:prefix:{block_hash.hex()}"


def _set_key(tenant_id: str) -> str:
    return f"hearth:{_key_part(tenant_id)}:prefixes"


def _key_part(tenant_id: str) -> str:
    """Whatever a tenant is called, its keys are not another's, nor a pattern that finds them."""
    return quote(tenant_id, safe="@")
