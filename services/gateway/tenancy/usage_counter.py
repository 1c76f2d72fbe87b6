"""Counts requests and tokens by tenant, model and day, and writes them to Redis asynchronously.

A request counts once, with its delivered tokens, however often it was resubmitted. A running one is
counted every RUNNING_S, so that a killed gateway loses the usage of at most that time.
Counts are buffered here and sent to Redis in numbered batches. A batch does not change until Redis
has confirmed it, and Redis stores the number of the last batch of each process: a batch that is
sent again because the reply was lost is not counted twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice

import structlog

from shared.background import Background, failing_alone
from shared.clock import Clock
from shared.store import Store, StoreUnavailable, reading_reply
from shared.tenancy.site_usage import DELETED_S, USAGE_DELETED, USAGE_UNSENT, owner_of_usage
from shared.tenancy.tenant import TenantRecord, UsageKind, usage_of

log = structlog.get_logger(__name__)

FLUSH_S = 0.5
RUNNING_S = 5.0
MAX_PER_BATCH = 500
MAX_PENDING = 100_000  # counts by tenant, day, model, kind; more are dropped and logged
RETENTION_S = 400 * 86_400
BATCH_RETENTION_S = DELETED_S
RETRY_REJECTED_S = 30.0
LAST_TRIES = 45  # 4.5 s, which with the 10 s of a drain are within the 15 s before SIGKILL

# KEYS: the writer's last batch, what to report to other sites, the owners of deleted usage, then a
# record for each count. ARGV: the batch's number, the TTLs of records and batches in seconds, then
# field, amount and owner of each count. Returns the indices of counts whose records have the wrong
# type; the writer retries these counts. Those whose owner's usage is deleted are dropped. Records
# of other sites' tenants, which have a slash in their names, are marked.
ADD_UP = """
local last = redis.call('HMGET', KEYS[1], 'number', 'refused')
if (tonumber(last[1]) or 0) >= tonumber(ARGV[1]) then return last[2] end
local refused = ''
for i = 4, #KEYS do
  local field, amount, owner = unpack(ARGV, 3 * i - 8, 3 * i - 6)
  if not redis.call('ZSCORE', KEYS[3], owner) then
    local sum = redis.pcall('HINCRBY', KEYS[i], field, amount)
    if type(sum) == 'table' then
      refused = refused .. (i - 4) .. ' '
    else
      redis.call('EXPIRE', KEYS[i], ARGV[2])
      if string.find(KEYS[i], '/', 1, true) then redis.call('HINCRBY', KEYS[2], KEYS[i], 1) end
    end
  end
end
redis.call('HSET', KEYS[1], 'number', ARGV[1], 'refused', refused)
redis.call('EXPIRE', KEYS[1], ARGV[3])
return refused
"""

# (tenant, its creation, day, model, kind)
Place = tuple[str, float, str, str, UsageKind]


def last_batch_of(writer_id: str) -> str:
    return f"hearth:usage_batch:{writer_id}"


def day_of(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


class UsageCounter:
    """Counts usage and sends it to Redis. `writer_id` is unique per process start. `now` returns
    Unix seconds, for the day.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        writer_id: str,
        now: Callable[[], float],
        max_pending: int = MAX_PENDING,
    ) -> None:
        self.num_dropped = 0
        self._store = store
        self._clock = clock
        self._writer_id = writer_id
        self._now = now
        self._max_pending = max_pending
        self._pending: Counter[Place] = Counter()
        self._batch: list[tuple[Place, int]] = []
        self._number = 0
        self._rejected: Counter[Place] = Counter()
        self._retry_rejected_at = 0.0
        self._flushing = asyncio.Lock()  # one batch is sent at a time
        self._background = Background()

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._batch) + len(self._rejected)

    def count(self, tenant: TenantRecord, model: str, counts: dict[UsageKind, int]) -> None:
        day = day_of(self._now())
        for kind, amount in counts.items():
            place: Place = (tenant.tenant_id, tenant.created_at, day, model, kind)
            if not amount:
                continue
            if place in self._pending or len(self._pending) < self._max_pending:
                self._pending[place] += amount
            else:
                self._drop(place, amount)

    def start(self, count_running: Callable[[], None] = lambda: None) -> None:
        """Starts to send counts. `count_running` is called every RUNNING_S, to count what running
        requests have used.
        """
        self._background.start_own(self._run(count_running))

    async def stop(self) -> None:
        """Flushes. Counts that Redis does not accept now stay in the log only."""
        await self._background.stop()
        self._retry_rejected_at = 0.0
        for _ in range(LAST_TRIES):
            if await self.flush():
                break
            await self._clock.sleep(FLUSH_S / 5)
        left = Counter(self._rejected)
        left.update(dict(self._batch))
        left.update(self._pending)
        for place, amount in left.items():
            self._drop(place, amount)

    async def flush(self) -> bool:
        """Sends all buffered counts. Returns False, without losing any, if Redis is unavailable."""
        async with self._flushing:
            if self._rejected and self._clock.now() >= self._retry_rejected_at:
                self._pending.update(self._rejected)  # the record may have been repaired
                self._rejected.clear()
            while self._batch or self._pending:
                if not await self._flush_batch():
                    return False
            return True

    async def _flush_batch(self) -> bool:
        if not self._batch:
            self._batch = list(islice(self._pending.items(), MAX_PER_BATCH))
            self._number += 1
            for place, _ in self._batch:
                del self._pending[place]
        keys = [last_batch_of(self._writer_id), USAGE_UNSENT, USAGE_DELETED]
        arguments: list[str | int] = [self._number, RETENTION_S, BATCH_RETENTION_S]
        for (tenant_id, created_at, day, model, kind), amount in self._batch:
            keys.append(usage_of(tenant_id, day))
            arguments += [f"{kind}:{model}", amount, owner_of_usage(tenant_id, created_at)]
        try:
            reply = await self._store.evaluate(ADD_UP, keys, arguments)
            with reading_reply():
                rejected = [self._batch[int(index)] for index in reply.split()]
        except StoreUnavailable:
            return False
        self._batch = []
        for place, amount in rejected:
            self._rejected[place] += amount
            self._retry_rejected_at = self._clock.now() + RETRY_REJECTED_S
            log.error("usage_unreadable", tenant_id=place[0], day=place[2])
        return True

    async def _run(self, count_running: Callable[[], None]) -> None:
        counted_at = self._clock.now()
        while True:
            await self._clock.sleep(FLUSH_S)
            if self._clock.now() - counted_at >= RUNNING_S:
                counted_at = self._clock.now()
                with failing_alone("running_requests_not_counted"):
                    count_running()
            with failing_alone("usage_not_sent"):
                await self.flush()

    def _drop(self, place: Place, amount: int) -> None:
        self.num_dropped += 1
        tenant_id, _, day, model, kind = place
        log.error(
            "usage_not_stored", tenant_id=tenant_id, day=day, model=model, kind=kind, amount=amount
        )
