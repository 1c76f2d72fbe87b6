"""Selects the sequences of the next step, and the number of tokens of each.

One batcher serves both phases: there is no prefill mode and no decode mode; the scheduled tokens
advance `num_computed_tokens` towards `num_tokens` under a token budget. The order is:

    1. running sequences that lack one token (decode), so that long prompts never stall them
    2. running sequences that lack more (chunked prefill), oldest first
    3. waiting sequences, FIFO, if all blocks of the prompt and the watermark are free

The budget is lower for a time after steps ran out of memory (step_limit.py). Where it has fewer
tokens than there are sequences that lack one, these take turns.

When a running sequence needs a block and none is free, the newest running sequence is preempted: it
releases all blocks and is computed again later (its blocks may still be in the cache).

A sequence computes its tokens up to the first image that is not encoded yet, and keeps its row and
blocks while it waits for that image.

A stalled sequence waits for its grammar. It computes all its tokens but the last, which would
sample, and keeps its row and blocks unless it is preempted.

The choices of one request start from the blocks of their shared prompt. With zero retention these
are found by no other way: a choice that waits, or is preempted, is computed again. A sequence that
will write into a block with other holders gets a copy of it, made before the step's writes; the
last holder writes in place.

Steps may be in flight, submitted and not yet applied. A sequence in one of them joins the next step
only with the next chunk of its prompt, or where `may_sample_ahead` allows it with the token that is
being sampled. It is not preempted: its blocks are in use. If only that would make room, the step
stays short, so that one of the next steps can preempt it.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from shared.engine.batching.block_needs import BlockNeeds
from shared.engine.batching.block_pool import BlockPool
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.batching.step_limit import StepLimit
from shared.kv_layout import first_sent


class ScheduledSequence(msgspec.Struct, frozen=True):
    sequence: Sequence
    num_scheduled_tokens: int
    start: int  # position of the first of them
    completes: bool  # this step computes the sequence's last token
    # (source, destination) blocks to copy first; the row holds the sources until the step ends
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this step samples a token for the sequence."""
        return self.completes and self.sequence.sampling is not None


def _never(sequence: Sequence) -> bool:
    return False


class Batcher:
    def __init__(
        self, pool: BlockPool, *, max_batch_tokens: int, max_sequences: int, watermark: float = 0.01
    ) -> None:
        """Admits waiting sequences only while the share `watermark` of the pool's blocks stays
        free for running ones.
        """
        self.pool = pool
        self.needs = BlockNeeds(pool.reaches, pool.block_size, max_batch_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_admitted_tokens = 0  # tokens since the start; each sequence counts once
        self.num_preemptions = 0
        self.num_admitted_cached_tokens = 0
        self.limit = StepLimit(max_batch_tokens)
        self._turn = 0  # of the rows of one token, where a step has too few tokens for all
        self._max_sequences = max_sequences
        self._watermark = watermark
        # Copies of the step being scheduled: (source, destination) blocks.
        self._block_copies: dict[Sequence, list[tuple[int, int]]] = {}
        self._num_copies = Counter[int]()  # of each source
        self._awaited: Sequence | None = None  # its steps in flight hold needed blocks

    @property
    def _watermark_blocks(self) -> int:
        return int(self.pool.num_blocks * self._watermark)

    def add(self, sequence: Sequence) -> None:
        """Queues a WAITING sequence. One that already holds blocks runs without admission."""
        if sequence.block_tables and len(self.running) < self._max_sequences:
            sequence.transition_to(SequenceState.RUNNING)
            self.running.append(sequence)
        elif sequence.block_tables:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """The children run from the parent's KV. Those without a free row or enough blocks wait,
        before all others that hold no blocks; they match the parent's full blocks in the cache.
        """
        num_full, num_groups = parent.num_committed_blocks, len(parent.block_tables)
        # the last child to write takes over the parent's partial block of each group
        num_partial = sum(len(table) - num_full for table in parent.block_tables)
        room = self.pool.num_free_blocks + num_partial
        waiting = []
        for child in children:
            room -= num_groups * (self.pool.blocks_for(child.num_tokens) - num_full)
            if room >= self._watermark_blocks and len(self.running) < self._max_sequences:
                self._share_blocks(parent, child)
                self.add(child)
            else:
                waiting.append(child)
        for child in reversed(waiting):
            self._wait_first(child)

    def remove(self, sequence: Sequence) -> None:
        """Removes the sequence from the queues; the caller releases its blocks."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(
        self, may_sample_ahead: Callable[[Sequence], bool] = _never, num_stages: int = 1
    ) -> tuple[list[ScheduledSequence], list[Sequence]]:
        """Returns the step's rows, those of a single token first, and prefills that were completely
        cached (HELD).

        A sequence whose next token is being sampled may compute it already if `may_sample_ahead`
        says so. A pipeline of `num_stages` allows none: it spreads running rows over as many steps.
        """
        scheduled: dict[Sequence, ScheduledSequence] = {}
        max_rows = -(-len(self.running) // num_stages)
        budget = self.limit.tokens
        num_preempted = 0
        for sequence, num_computable in self._running_by_turns(may_sample_ahead):
            if budget == 0 or len(scheduled) == max_rows:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for an older one in this step
            in_flight = sequence.in_flight
            num_tokens = sequence.next_num_tokens if in_flight else len(sequence.token_ids)
            if num_tokens > sequence.num_writable_tokens:
                for victim in self._make_room(sequence):
                    num_preempted += 1
                    if victim in scheduled:
                        budget += scheduled.pop(victim).num_scheduled_tokens
                if sequence.state is not SequenceState.RUNNING:
                    continue
                if self._awaited is not None:
                    scheduled.pop(self._awaited, None)
                    break
            count = num_computable if num_computable < budget else budget
            start = sequence.next_position if in_flight else sequence.num_computed_tokens
            completes = start + count == num_tokens
            scheduled[sequence] = ScheduledSequence(sequence, count, start, completes)
            budget -= count
        if self._block_copies:
            self._add_copies(scheduled)
        rows = list(scheduled.values())
        is_short = num_preempted or self._awaited is not None
        found = [] if is_short else self._admit(rows, budget)
        self._block_copies.clear()
        self._num_copies.clear()
        self._awaited = None
        if len(rows) > len(scheduled) or budget < self.limit.tokens - len(rows):
            rows.sort(key=_has_several_tokens)
        return rows, found

    def _add_copies(self, scheduled: dict[Sequence, ScheduledSequence]) -> None:
        for sequence, copies in self._block_copies.items():
            if sequence in scheduled:
                row = scheduled[sequence]
                scheduled[sequence] = msgspec.structs.replace(row, block_copies=tuple(copies))

    def _running_by_turns(
        self, may_sample_ahead: Callable[[Sequence], bool]
    ) -> list[tuple[Sequence, int]]:
        """Returns running sequences with the number of tokens to compute: first those with one,
        then those with more; both oldest first. A sequence that lacks only the token that it is
        stalled at is left out.
        """
        computable = [
            (
                each,
                _num_ahead(each, may_sample_ahead)
                if each.in_flight
                else len(each.token_ids)
                - each.num_computed_tokens
                - (each.grammar is not None and each.grammar.is_stalled),
            )
            for each in self.running
        ]
        if any(each.images is not None for each in self.running):
            computable = [
                (each, each.num_ready(each.next_position, count)) for each, count in computable
            ]
        ones = [each for each in computable if each[1] == 1]
        if self.limit.is_lowered and len(ones) > self.limit.tokens:
            ones = self._rotated(ones)
        return ones if len(ones) == len(computable) else ones + [e for e in computable if e[1] > 1]

    def _rotated(self, ones: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Begins after the rows of the last step: else the oldest alone would be computed."""
        first = self._turn % len(ones)
        self._turn = first + self.limit.tokens
        return ones[first:] + ones[:first]

    def _share_blocks(self, parent: Sequence, child: Sequence) -> None:
        for held in parent.held_blocks:
            self.pool.hold(held)
        child.block_tables = [table[:] for table in parent.block_tables]
        child.first_blocks = parent.first_blocks[:]
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_committed_blocks = parent.num_committed_blocks
        child.num_cached_tokens = parent.num_cached_tokens

    def _make_room(self, sequence: Sequence) -> list[Sequence]:
        """Gives `sequence` blocks for its next step in every group, unshared where it writes.
        Returns the sequences preempted for that. If one in flight had to be, sets `_awaited`
        instead.
        """
        victims: list[Sequence] = []
        missing = [
            max(0, self._end(sequence, group, sequence.next_position) - len(table))
            for group, table in enumerate(sequence.block_tables)
        ]
        num_missing = sum(missing)
        while self.pool.num_free_blocks < num_missing + len(self._shared_groups(sequence)):
            victim = next((s for s in reversed(self.running) if not s.is_prefill_only), sequence)
            if victim.in_flight:
                self._awaited = victim
                return victims
            self.preempt(victim)
            victims.append(victim)
            if victim is sequence:
                return victims
        for group in self._shared_groups(sequence):
            self._copy_block(sequence, group)
        for table, count in zip(sequence.block_tables, missing, strict=True):
            if count:
                table.extend(self._allocate(count, sequence))
        num_blocks = min(map(len, sequence.block_tables))
        sequence.num_writable_tokens = num_blocks * self.pool.block_size
        return victims

    def _shared_groups(self, sequence: Sequence) -> list[int]:
        """Returns the groups in which its next KV would be written to a block with another
        holder.
        """
        index = sequence.next_position // self.pool.block_size
        return [
            group
            for group, table in enumerate(sequence.block_tables)
            if index < len(table) and self._is_shared(table[index])
        ]

    def _is_shared(self, block_id: int) -> bool:
        # rows that copy the block also hold it, but write elsewhere
        return self.pool.ref_count(block_id) - self._num_copies[block_id] > 1

    def _copy_block(self, sequence: Sequence, group: int) -> None:
        """Replaces the shared block by a new one. The row takes over the reference to the source,
        so that no other sequence can write to the source while the step may still read it.
        """
        block_index = sequence.next_position // self.pool.block_size
        table = sequence.block_tables[group]
        (destination,) = self._allocate(1, sequence)
        self._block_copies.setdefault(sequence, []).append((table[block_index], destination))
        self._num_copies[table[block_index]] += 1
        table[block_index] = destination

    def _allocate(self, count: int, sequence: Sequence) -> list[int]:
        return self.pool.allocate(
            count, tenant_id=sequence.tenant_id, is_private=sequence.is_zero_retention
        )

    def give_back(self, sequence: Sequence) -> None:
        """Releases all its blocks."""
        for held in sequence.held_blocks:
            self.pool.release(held)
        sequence.block_tables = []
        sequence.first_blocks = []
        sequence.num_writable_tokens = 0

    def preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.transition_to(SequenceState.WAITING)
        for source, _ in self._block_copies.pop(sequence, ()):
            self.pool.release([source])
            self._num_copies[source] -= 1
        self.restart(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Queues a WAITING sequence that is computed again, from what the cache then holds."""
        self.give_back(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_committed_blocks = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait_first(sequence)

    def _wait_first(self, sequence: Sequence) -> None:
        # It goes behind those that hold blocks: before them it could wait for the blocks that they
        # hold.
        num_holders = sum(bool(each.block_tables) for each in self.waiting)
        self.waiting.insert(num_holders, sequence)

    def _admit(self, rows: list[ScheduledSequence], budget: int) -> list[Sequence]:
        """Adds the rows of admitted sequences. Returns prefills that were completely cached."""
        found: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            spare = self._watermark_blocks if self.running else 0
            if not sequence.block_tables and not self.allocate_prompt(sequence, spare=spare):
                break
            self.waiting.popleft()
            num_uncomputed = sequence.num_uncomputed_tokens
            if num_uncomputed == 0:
                sequence.transition_to(SequenceState.HELD)
                found.append(sequence)
                continue
            sequence.transition_to(SequenceState.RUNNING)
            self.running.append(sequence)
            start = sequence.num_computed_tokens
            count = min(num_uncomputed - sequence.is_stalled, budget)
            count = sequence.num_ready(start, count)
            if count:
                completes = start + count == len(sequence.token_ids)
                rows.append(ScheduledSequence(sequence, count, start, completes))
                budget -= count
        return found

    def allocate_prompt(self, sequence: Sequence, *, spare: int, is_received: bool = False) -> bool:
        """Takes the cached prefix and new blocks for the rest, leaving `spare` blocks free.

        A bounded group gets blocks for the first step; if the prompt's KV `is_received`, for the
        tokens that are sent of it. Returns False, and takes nothing, if too few blocks are free.
        """
        size = self.pool.block_size
        cached = self.pool.match(sequence.findable_hashes[: sequence.num_prefill_tokens // size])
        num_cached = cached.num_blocks
        spans = [
            self._span(sequence, group, num_cached * size, is_received=is_received)
            for group in range(len(self.pool.reaches))
        ]
        held = [
            block_ids[max(0, first - first_cached) :]
            for (first, _), first_cached, block_ids in zip(
                spans, cached.first_blocks, cached.block_ids, strict=True
            )
        ]
        counts = [end - max(first, num_cached) for first, end in spans]
        num_kept = sum(map(self.pool.num_evictable_in, held))
        if sum(counts) + num_kept + spare > self.pool.num_free_blocks:
            return False
        for block_ids in held:
            self.pool.hold(block_ids)
        self.pool.limit(sequence.tenant_id, sequence.kv_quota_tokens)
        sequence.block_tables = [
            array("q", [0] * first + block_ids + self._allocate(count, sequence))
            for (first, _), block_ids, count in zip(spans, held, counts, strict=True)
        ]
        sequence.first_blocks = [first for first, _ in spans]
        sequence.num_computed_tokens = num_cached * size
        sequence.num_committed_blocks = num_cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_admitted_tokens += sequence.num_tokens
            self.num_admitted_cached_tokens += sequence.num_cached_tokens
        return True

    def _span(
        self, sequence: Sequence, group: int, num_computed: int, *, is_received: bool
    ) -> tuple[int, int]:
        """[first, end) of the blocks that a group needs first."""
        if not is_received:
            end = self._end(sequence, group, num_computed)
            return self.needs.first(group, num_computed), end
        reach, size = self.pool.reaches[group], self.pool.block_size
        first = first_sent(reach, sequence.num_prefill_tokens, size) // size
        return first, self.pool.blocks_for(sequence.num_tokens)

    def _end(self, sequence: Sequence, group: int, num_computed: int) -> int:
        """Returns the end of the blocks to hold. A prefill has all its blocks from the start, if
        the pool holds as many: it is not preempted while it is pushed.
        """
        if sequence.is_prefill_only:
            end = self.pool.blocks_for(sequence.num_tokens)
            if end * len(self.pool.reaches) <= self.pool.num_blocks:
                return end
        return self.needs.end(group, num_computed, sequence.next_num_tokens)


def _has_several_tokens(row: ScheduledSequence) -> bool:
    return row.num_scheduled_tokens > 1


def _num_ahead(sequence: Sequence, may_sample_ahead: Callable[[Sequence], bool]) -> int:
    """Returns the number of tokens that a sequence in flight can compute in the next step."""
    if sequence.is_aborted:
        return 0
    if sequence.next_num_tokens > len(sequence.token_ids):  # one token is being sampled
        return int(may_sample_ahead(sequence))
    return len(sequence.token_ids) - sequence.next_position - sequence.is_stalled
