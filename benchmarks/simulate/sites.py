"""Workers on the virtual clock: computation, caches and reports, at the level of requests.

A prefill worker computes one prompt after the other. A decode worker samples one token for all its
sequences in each step; a step takes longer the more KV it reads, and waits while a prompt is
computed on the same device. Memory is counted in blocks of the trace; blocks of finished requests
stay cached until eviction by least recent use. Nothing is preempted: a request without room for its
complete output is rejected, as by a busy worker.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulate.trace import BLOCK_TOKENS, TraceRequest
from shared.messages import BlocksRemoved, BlocksStored, KvEvents, WorkerLoad

MODEL, REVISION, KV_FORMAT = "model", "r1", "bf16/b512"
CHUNK_TOKENS = 2048
EVENTS_S = 0.05  # time between two messages to the index
NO_PARENT = bytes(16)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, for an 8 B model on a mid-range GPU with a 25 Gb/s link: 128 KiB of KV per token."""

    prefill_step_s: float = 0.008
    prefill_token_s: float = 1 / 12_000
    decode_step_s: float = 0.012
    decode_sequence_s: float = 30e-6
    decode_kv_token_s: float = 25e-9
    push_token_s: float = 42e-6
    handoff_overhead_s: float = (
        0.002  # until a prefill worker has replied, or a last frame is acknowledged
    )
    num_blocks: int = 400  # blocks of 512 tokens: 25 GiB of KV

    def prefill_s(self, num_tokens: int) -> float:
        num_steps = max(1, -(-num_tokens // CHUNK_TOKENS))
        return num_steps * self.prefill_step_s + num_tokens * self.prefill_token_s


@dataclass(eq=False, slots=True)
class Job:
    """A placed request."""

    trace: TraceRequest
    submitted_at: float
    decode: Decode
    prefill: Prefill | None = None
    num_computed_tokens: int = 0
    first_token_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the last prompt token."""
        return self.trace.input_length - 1

    @property
    def num_blocks(self) -> int:
        return -(-(self.trace.input_length + self.trace.output_length) // BLOCK_TOKENS)


Later = Callable[[float, Callable[..., None], object], None]  # after seconds, call with this


def hash_of(hash_id: int) -> bytes:
    return hash_id.to_bytes(16, "little")


class Cache:
    """Blocks by hash id, the least recently used first; collects changes since the last call."""

    def __init__(self, num_blocks: int, on_change: Callable[[], None]) -> None:
        self._num_blocks = num_blocks
        self._on_change = on_change
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def num_cached_tokens(self, request: TraceRequest) -> int:
        """Returns the cached tokens of its prompt, without the last token; marks them as used."""
        num_blocks = 0
        for hash_id in request.hash_ids:
            if hash_id not in self._blocks:
                break
            self._blocks.move_to_end(hash_id)
            num_blocks += 1
        return min(num_blocks * BLOCK_TOKENS, request.input_length - 1)

    def store(self, hash_ids: list[int], num_tokens: int) -> None:
        """Stores the full blocks."""
        for hash_id in hash_ids[: num_tokens // BLOCK_TOKENS]:
            if hash_id not in self._blocks:
                self._stored[hash_id] = None
                self._removed.pop(hash_id, None)
            self._blocks[hash_id] = None
            self._blocks.move_to_end(hash_id)
        while len(self._blocks) > self._num_blocks:
            evicted, _ = self._blocks.popitem(last=False)
            self._removed[evicted] = None
            self._stored.pop(evicted, None)
        if self._stored or self._removed:
            self._on_change()

    def take_events(self) -> tuple[BlocksStored | BlocksRemoved, ...]:
        stored, removed = (
            b"".join(map(hash_of, self._stored)),
            b"".join(map(hash_of, self._removed)),
        )
        self._stored, self._removed = {}, {}
        events: list[BlocksStored | BlocksRemoved] = []
        if stored:
            events.append(
                BlocksStored(
                    tenant_id="t", parent_hash=NO_PARENT, first_block_index=0, block_hashes=stored
                )
            )
        if removed:
            events.append(BlocksRemoved(block_hashes=removed))
        return tuple(events)


@dataclass(eq=False)
class Site:
    """The common part of both kinds of worker."""

    worker_id: str
    costs: Costs
    later: Later
    tell: Callable[[KvEvents], None]  # reports to the index
    step: int = 0
    num_events: int = 0
    busy_s: float = 0.0
    num_busy_steps: float = 0.0
    num_computed: int = 0
    is_telling: bool = False

    def __post_init__(self) -> None:
        self.cache = Cache(self.costs.num_blocks, self._cache_changed)

    def _cache_changed(self) -> None:
        if not self.is_telling:
            self.is_telling = True
            self.later(EVENTS_S, self._tell, None)

    def _tell(self, now: float, _: object) -> None:
        self.is_telling = False
        self.num_events += 1
        self.tell(
            KvEvents(
                worker_id=self.worker_id,
                epoch=1,
                sequence_number=self.num_events,
                model=MODEL,
                revision=REVISION,
                kv_format=KV_FORMAT,
                events=self.cache.take_events(),
            )
        )

    def count_prefill(self, num_tokens: int) -> None:
        self.busy_s += self.costs.prefill_s(num_tokens)
        self.num_busy_steps += max(1, -(-num_tokens // CHUNK_TOKENS))
        self.num_computed += num_tokens


@dataclass(eq=False)
class Prefill(Site):
    queue: deque[Job] = field(default_factory=deque)
    num_queued_tokens: int = 0
    num_pushed: int = 0
    push_s: float = 0.0
    current: Job | None = None
    begun_at: float = 0.0

    def enqueue(self, now: float, job: Job) -> None:
        job.num_computed_tokens = job.num_tokens - self.cache.num_cached_tokens(job.trace)
        self.num_queued_tokens += job.num_computed_tokens
        self.queue.append(job)
        if self.current is None:
            self._begin(now)

    def load(self, now: float) -> WorkerLoad:
        self.step += 1
        done = 0.0 if self.current is None else (now - self.begun_at) / self.costs.prefill_token_s
        running = 0 if self.current is None else self.current.num_computed_tokens
        return WorkerLoad(
            step=self.step,
            step_budget_s=60.0,
            num_running=int(self.current is not None),
            num_waiting=len(self.queue),
            num_free_blocks=self.costs.num_blocks,
            num_total_blocks=self.costs.num_blocks,
            prefill_tokens_in_flight=self.num_queued_tokens - min(running, int(done)),
            num_computed_prompt_tokens=self.num_computed,
            num_busy_steps=int(self.num_busy_steps),
            busy_s=self.busy_s,
            num_pushed_tokens=self.num_pushed,
            push_s=self.push_s,
        )

    def _begin(self, now: float) -> None:
        job = self.current = self.queue.popleft()
        self.begun_at = now
        cached = self.cache.num_cached_tokens(job.trace)
        self.num_queued_tokens += job.num_tokens - cached - job.num_computed_tokens
        job.num_computed_tokens = job.num_tokens - cached
        self.later(self.costs.prefill_s(job.num_computed_tokens), self._ended, job)

    def _ended(self, now: float, job: Job) -> None:
        self.num_queued_tokens -= job.num_computed_tokens
        self.count_prefill(job.num_computed_tokens)
        self.cache.store(job.trace.hash_ids, job.trace.input_length)
        num_pushed = job.num_tokens - job.decode.cache.num_cached_tokens(job.trace)
        push_s = num_pushed * self.costs.push_token_s
        self.num_pushed += num_pushed
        self.push_s += push_s
        left_s = max(0.0, self.begun_at + push_s - now) + self.costs.handoff_overhead_s
        self.later(left_s, job.decode.activate, job)
        self.current = None
        if self.queue:
            self._begin(now)


@dataclass(eq=False)
class Decode(Site):
    """A decode site. `num_steps` counts steps as a real number; a sequence ends when the count
    reaches its end.
    """

    on_end: Callable[[float, Job], None] = lambda now, job: None
    num_held_blocks: int = 0
    num_steps: float = 0.0
    stalled_until: float = 0.0
    counted_at: float = 0.0
    num_running: int = 0
    num_kv_tokens: int = 0
    num_local_tokens: int = 0
    num_sampled: float = 0.0
    num_handoffs: int = 0
    handoff_ack_s: float = 0.0
    ends: list[tuple[float, int, Job]] = field(default_factory=list)
    version: int = 0

    def accept(self, now: float, job: Job) -> bool:
        """Accepts the request, and computes its prompt if no prefill worker does."""
        if self.num_held_blocks + job.num_blocks > self.costs.num_blocks:
            return False
        self.num_held_blocks += job.num_blocks
        if job.prefill is None:
            self._compute(now, job)
        else:
            self.num_handoffs += 1
            self.handoff_ack_s += self.costs.handoff_overhead_s / 2
            self.later(self.costs.handoff_overhead_s, job.prefill.enqueue, job)
        return True

    def activate(self, now: float, job: Job) -> None:
        self._advance(now)
        self.num_running += 1
        self.num_kv_tokens += job.trace.input_length + job.trace.output_length
        self.cache.store(job.trace.hash_ids, job.trace.input_length)
        job.first_token_at = max(now, self.stalled_until) + self._step_s()
        heapq.heappush(self.ends, (self.num_steps + job.trace.output_length, id(job), job))
        self._await_end(now)

    def load(self, now: float) -> WorkerLoad:
        self._advance(now)
        self.step += 1
        return WorkerLoad(
            step=self.step,
            step_budget_s=60.0,
            num_running=self.num_running,
            num_free_blocks=self.costs.num_blocks - self.num_held_blocks,
            num_total_blocks=self.costs.num_blocks,
            prefill_tokens_in_flight=self.num_local_tokens,
            decode_tokens_in_flight=self.num_kv_tokens,
            num_computed_prompt_tokens=self.num_computed,
            num_generated_tokens=int(self.num_sampled),
            num_busy_steps=int(self.num_busy_steps),
            busy_s=self.busy_s,
            num_handoffs=self.num_handoffs,
            handoff_ack_s=self.handoff_ack_s,
        )

    def _compute(self, now: float, job: Job) -> None:
        self._advance(now)
        job.num_computed_tokens = job.num_tokens - self.cache.num_cached_tokens(job.trace)
        self.num_local_tokens += job.num_computed_tokens
        took_s = self.costs.prefill_s(job.num_computed_tokens)
        self.stalled_until = max(now, self.stalled_until) + took_s
        self.later(self.stalled_until - now, self._computed, job)
        self._await_end(now)

    def _computed(self, now: float, job: Job) -> None:
        self.num_local_tokens -= job.num_computed_tokens
        self.count_prefill(job.num_computed_tokens)
        self.activate(now, job)

    def _step_s(self) -> float:
        costs = self.costs
        return (
            costs.decode_step_s
            + costs.decode_sequence_s * self.num_running
            + costs.decode_kv_token_s * self.num_kv_tokens
        )

    def _advance(self, now: float) -> None:
        moved_s = now - max(self.counted_at, self.stalled_until)
        self.counted_at = now
        if moved_s > 0 and self.num_running:
            num_steps = moved_s / self._step_s()
            self.num_steps += num_steps
            self.busy_s += moved_s
            self.num_busy_steps += num_steps
            self.num_sampled += num_steps * self.num_running

    def _await_end(self, now: float) -> None:
        self.version += 1
        if self.ends:
            left_s = max(0.0, self.ends[0][0] - self.num_steps) * self._step_s()
            self.later(max(0.0, self.stalled_until - now) + left_s, self._end, self.version)

    def _end(self, now: float, version: int) -> None:
        if version != self.version:  # the schedule has changed since this event was planned
            return
        self._advance(now)
        _, _, job = heapq.heappop(self.ends)
        self.num_running -= 1
        self.num_kv_tokens -= job.trace.input_length + job.trace.output_length
        self.num_held_blocks -= job.num_blocks
        num_tokens = job.trace.input_length + job.trace.output_length - 1
        self.cache.store(job.trace.kept_hash_ids, num_tokens)
        self.on_end(now, job)
        self._await_end(now)
