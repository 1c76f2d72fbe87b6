"""KV marked with its owner, and a record of the prefixes computed for each owner.

The KV of a token carries the number of the tenant and salt for which it was computed, through the
paged cache, block copies and the frames of a push. Each reader and receiver of KV must be its
owner: this is checked at each access, without a block hash. The other tiers' data (index, events,
Redis) is compared with that record, in tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from urllib.parse import quote

import numpy as np

from services.kv_index.registry import HOLDER
from shared.block_hash import extend_chain
from shared.engine.batching.sequence import Sequence
from shared.engine.engine import Engine
from shared.engine.executors.timing_executor import STATE_BYTES
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.messages import BlocksStored, KvEvents, Request
from shared.packing import unpack_hashes
from tests.support.world.store import MemoryStore
from tests.support.world.workers import BLOCK_SIZE, CopyingExecutor

MARK = STATE_BYTES - 1  # the byte of a token's KV that has the owner's number; 0: no owner


class Origins:
    """The prefixes computed for each owner, and every access by another owner."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.num_checked = 0
        self.tenant_of: dict[int, str] = {}
        self._numbers: dict[tuple[str, bytes], int] = {}  # by tenant and root
        self._salts: dict[int, str] = {}
        # worker -> owner's number and tokens of every prefix of full blocks that it ever had
        self.had: dict[str, set[tuple[int, tuple[int, ...]]]] = defaultdict(set)
        self.hashes_of: dict[str, dict[bytes, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.tenant_of_stored: dict[bytes, str] = {}

    def record(self, text: str) -> None:
        self.found.append(text)

    def declare(self, request: Request, cache_salt: str) -> int:
        key = (request.tenant_id, request.cache_root)
        number = self._numbers.setdefault(key, len(self._numbers) + 1)
        if self._salts.setdefault(number, cache_salt) != cache_salt:
            self.record("two salts of a tenant have one root")
        self.tenant_of[number] = request.tenant_id
        return number

    def number_of(self, sequence: Sequence) -> int:
        return self._numbers[sequence.tenant_id, sequence.cache_root]

    def computed(self, worker_id: str, sequence: Sequence, num_tokens: int) -> None:
        number, tokens = self.number_of(sequence), sequence.token_ids[:num_tokens]
        had, hashes = self.had[worker_id], self.hashes_of[sequence.tenant_id]
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            had.add((number, tuple(tokens[:end])))
        for each in extend_chain(sequence.cache_root, tokens, BLOCK_SIZE):
            hashes[each].add(worker_id)

    def check_kv(self, what: str, number: int, marks: np.ndarray) -> None:
        self.num_checked += len(marks)
        if (marks != number).any():
            self.record(f"{what}: KV of {sorted(set(marks.tolist()))} for {number}")

    def check_hit(self, what: str, worker_id: str, number: int, tokens: list[int]) -> None:
        self.num_checked += bool(tokens)
        if tokens and (number, tuple(tokens)) not in self.had[worker_id]:
            self.record(f"{what}: {worker_id} never had {len(tokens)} tokens of {number}")

    def take_events(self, message: KvEvents) -> None:
        for event in message.events:
            if isinstance(event, BlocksStored):
                for each in unpack_hashes(event.block_hashes):
                    if self.tenant_of_stored.setdefault(each, event.tenant_id) != event.tenant_id:
                        self.record("events: two tenants stored one block")
                    if each not in self.hashes_of[event.tenant_id]:
                        self.record("events: a block that was not computed for its tenant")

    def check_registry(self, store: MemoryStore, num_requested: dict[str, int]) -> None:
        allowed_keys: set[str] = set()
        for tenant_id in set(self.tenant_of.values()):
            key = f"hearth:{quote(tenant_id, safe='@')}"
            hashes, num_hits = self.hashes_of[tenant_id], 0
            allowed_keys.add(f"{key}:prefixes")
            for block_hash, workers in hashes.items():
                record = store.data.get(f"{key}:prefix:{block_hash.hex()}")
                allowed_keys.add(f"{key}:prefix:{block_hash.hex()}")
                if record is not None:
                    num_hits += int(record.get(b"hits", 0))
                    names = [name.decode() for name in record]
                    holders = {each.removeprefix(HOLDER) for each in names if HOLDER in each}
                    if not holders <= workers:
                        self.record(f"registry: {holders - workers} never had it for its tenant")
            listed = store.data.get(f"{key}:prefixes", {})
            if not {bytes.fromhex(each.decode()) for each in listed} <= set(hashes):
                self.record("registry: a tenant's list names a block that is not its own")
            if num_hits > num_requested.get(tenant_id, 0):
                self.record(
                    f"registry: {num_hits} hits of {num_requested.get(tenant_id, 0)} questions"
                )
        if not set(store.data) <= allowed_keys:
            self.record(f"registry: {sorted(set(store.data) - allowed_keys)} are no tenant's")


class MarkedExecutor(CopyingExecutor):
    """Marks the KV it computes; checks the marks of everything read, copied and received."""

    engine: Engine
    origins: Origins
    worker_id: str

    async def run(self, inputs: StepInputs) -> StepOutput:
        rows = list(self._rows(inputs))
        blocks = self._kv.reshape(self.num_blocks, -1)
        for source, destination in inputs.block_copies:
            blocks[destination] = blocks[source]
        for sequence, slots, num_new in rows:
            number = self.origins.number_of(sequence)
            before = self._kv[slots[: len(slots) - num_new], MARK]
            self.origins.check_kv(f"{self.worker_id} reads", number, before)
        output = await super().run(inputs)
        for sequence, slots, num_new in rows:
            self._kv[slots[len(slots) - num_new :], MARK] = self.origins.number_of(sequence)
            self.origins.computed(self.worker_id, sequence, len(slots))
        return output

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        number = self.origins.number_of(self._holder(run.block_table))
        marks = self._kv[self._slots(run.block_table, run.first_token, run.num_tokens), MARK]
        self.origins.check_kv(f"{self.worker_id} pushes", number, marks)
        await super().read_kv(run, out)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        sequence = self._holder(run.block_table)
        marks = np.frombuffer(payload, np.uint8).reshape(2, run.num_tokens, -1)[1, :, -1]
        number = self.origins.number_of(sequence)
        self.origins.check_kv(f"{self.worker_id} is sent", number, marks)
        await super().write_kv(run, payload)
        self.origins.computed(self.worker_id, sequence, run.first_token + run.num_tokens)

    def _rows(self, inputs: StepInputs) -> Iterator[tuple[Sequence, list[int], int]]:
        """Each sequence in a step, the slots of its context, and how many are new. A block
        that is written has one holder.
        """
        in_step = [each for each in self.engine.batcher.running if each.is_in_step]
        for row, (length, num_new) in enumerate(
            zip(inputs.context_lens.tolist(), inputs.query_lens.tolist(), strict=True)
        ):
            table = inputs.block_tables[0, row].tolist()
            place = (length - 1) // BLOCK_SIZE
            (sequence,) = (
                each
                for each in in_step
                if each.block_tables[0][place : place + 1].tolist() == table[place : place + 1]
            )
            yield sequence, self._slots(table, 0, length), num_new

    def _holder(self, block_table: list[int]) -> Sequence:
        engine, batcher = self.engine, self.engine.batcher
        holders = [*engine._reserved, *engine._held, *batcher.running, *batcher.waiting]
        return next(each for each in holders if block_table is each.block_tables[0])
