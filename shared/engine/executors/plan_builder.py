"""Turns the rows of each step into a plan: what has changed since the plan before. No I/O.

It remembers of each row what the ranks know: its blocks, and where the token lies that it drew
last. A sequence that is preempted loses its row; computed again, it is a new one.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from heapq import heappop, heappush
from weakref import ref

import msgspec

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.step import TokenMask
from shared.engine.step_plan import (
    Embedded,
    Fed,
    Grown,
    NewRow,
    PooledBefore,
    StepPlan,
    Successors,
    pack,
    unpack,
)

NOT_SAMPLED = -1


class _Row:
    """State of a row in the last plan. It does not keep its sequence, which may end between two
    steps.
    """

    __slots__ = (
        *("sampled_at", "num_all_blocks", "num_blocks", "num_preemptions", "number", "sequence"),
    )

    def __init__(self, number: int, sequence: Sequence) -> None:
        self.number = number
        self.sequence = ref(sequence)
        self.num_preemptions = sequence.num_preemptions
        self.num_blocks = list(map(len, sequence.block_tables))
        self.num_all_blocks = sum(self.num_blocks)
        self.sampled_at = NOT_SAMPLED  # position of a token on the device that is not computed yet


class PlanBuilder:
    def __init__(self, *, feeds_sampled: bool = False) -> None:
        """Creates a builder without rows. With `feeds_sampled` plans carry every token, also those
        that a rank has sampled: the first stage of a pipeline samples none.
        """
        self._feeds_sampled = feeds_sampled
        self._rows: dict[int, _Row] = {}  # key: identity of the sequence
        self._free: list[int] = []
        self._ended: list[int] = []  # rows that the next plan ends
        self._num_rows = 0  # taken or free
        self._step = 0

    def build(self, scheduled: list[ScheduledSequence]) -> tuple[StepPlan, tuple[TokenMask, ...]]:
        """Returns the next plan, and the masks of its rows, which are being computed."""
        grammars = _grammars(scheduled)  # may raise: nothing has changed yet
        try:
            plan = self._plan(scheduled, grammars)
        except BaseException:
            self._drop(scheduled)
            raise
        self._step += 1
        return plan, tuple(mask for _, mask in grammars if mask is not None)

    def take_back(self, plan: StepPlan, scheduled: list[ScheduledSequence]) -> None:
        """Takes back the plan of these rows, which has not reached the ranks, or not wholly. Those
        after it have to be taken back, too. The next plan has its number, and begins the rows anew.
        """
        self._step -= 1
        self._ended += unpack(plan.ended).tolist()
        self._drop(scheduled)

    def _drop(self, scheduled: list[ScheduledSequence]) -> None:
        for each in scheduled:
            row = self._rows.pop(id(each.sequence), None)
            if row is not None:
                self._end(row)

    def _end(self, row: _Row) -> None:
        heappush(self._free, row.number)
        self._ended.append(row.number)

    def _plan(
        self, scheduled: list[ScheduledSequence], grammars: list[tuple[int, TokenMask | None]]
    ) -> StepPlan:
        self._find_ended()
        rows: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        new: list[NewRow] = []
        grown: list[Grown] = []
        fed: list[Fed] = []
        pooled: list[PooledBefore] = []
        embedded: list[Embedded] = []
        for each in scheduled:
            sequence, count, start = each.sequence, each.num_scheduled_tokens, each.start
            row = self._rows.get(id(sequence))
            if row is None:
                row = self._take_row(sequence)
                new.append(_new_row(row.number, sequence))
            elif each.block_copies or row.num_all_blocks != sum(map(len, sequence.block_tables)):
                grown += _grown(row, each)
            if count != 1 or row.sampled_at != start:
                token_ids = sequence.token_ids[start : start + count]
                fed.append(Fed(row.number, pack(token_ids)))
                if sequence.pooled is not None and start and start == sequence.num_computed_tokens:
                    pooled.append(PooledBefore(row.number, sequence.pooled.tobytes()))
            if sequence.images is not None:
                vectors = sequence.images.vectors(start, count)
                if vectors is not None:
                    embedded.append(Embedded(row.number, pack(vectors.offsets), vectors.vectors))
            holds_sample = each.completes and not self._feeds_sampled
            row.sampled_at = start + count if holds_sample else NOT_SAMPLED
            rows.append(row.number)
            starts.append(start)
            counts.append(count)
        made = StepPlan(
            step=self._step,
            rows=pack(rows),
            starts=pack(starts),
            num_tokens=pack(counts),
            completes=bytes([each.completes for each in scheduled]),
            ended=pack(self._ended),
            new=tuple(new),
            grown=tuple(grown),
            fed=tuple(fed),
            copies=_copies(scheduled),
            successors=_successors(scheduled, rows),
            pooled=tuple(pooled),
            masked=pack([rows[index] for index, mask in grammars if mask is not None]),
            bans_stop=pack([rows[index] for index, mask in grammars if mask is None]),
            embedded=tuple(embedded),
        )
        self._ended = []
        return made

    def end_rows(self) -> bytes:
        """Frees the rows of sequences that have left the batch since their last step. Returns their
        numbers, which every `RankState` has to end.
        """
        self._find_ended()
        ended, self._ended = self._ended, []
        return pack(ended)

    def _find_ended(self) -> None:
        running = SequenceState.RUNNING
        gone = [
            (key, row)
            for key, row in self._rows.items()
            if (sequence := row.sequence()) is None
            or sequence.state is not running
            or sequence.num_preemptions != row.num_preemptions
        ]
        for key, row in gone:
            del self._rows[key]
            self._end(row)

    def _take_row(self, sequence: Sequence) -> _Row:
        """Returns the lowest free row: the ranks' arrays stay as short as the batch."""
        if self._free:
            number = heappop(self._free)
        else:
            number = self._num_rows
            self._num_rows += 1
        row = self._rows[id(sequence)] = _Row(number, sequence)
        return row


def _grammars(scheduled: list[ScheduledSequence]) -> list[tuple[int, TokenMask | None]]:
    """Returns the rows by index: with their masks, or None if they may not stop."""
    found: list[tuple[int, TokenMask | None]] = []
    for index, each in enumerate(scheduled):
        grammar = each.sequence.grammar
        if grammar is not None and each.samples:
            mask = grammar.mask()
            if mask is not None or grammar.bans_stop:
                found.append((index, mask))
    return found


def _copies(scheduled: list[ScheduledSequence]) -> tuple[tuple[int, int], ...]:
    return tuple([copy for each in scheduled if each.block_copies for copy in each.block_copies])


def _successors(scheduled: list[ScheduledSequence], rows: list[int]) -> tuple[Successors, ...]:
    found = []
    for each, row in zip(scheduled, rows, strict=True):
        sequence = each.sequence
        if sequence.prompt_logprobs is None or sequence.num_prompt_logprobs is None:
            continue
        token_ids = _successors_of(sequence, each.start + 1, each.num_scheduled_tokens)
        if token_ids:
            found.append(Successors(row, pack(token_ids), sequence.num_prompt_logprobs))
    return tuple(found)


def _successors_of(sequence: Sequence, first: int, num_tokens: int) -> list[int]:
    """Returns the prompt tokens in [first, first + num_tokens)."""
    end = first + num_tokens
    successors = sequence.token_ids[first : min(end, sequence.num_prompt_tokens)]
    if sequence.next_token_id is not None and end > sequence.num_prompt_tokens:
        successors.append(sequence.next_token_id)
    return successors


def _grown(row: _Row, scheduled: ScheduledSequence) -> list[Grown]:
    """Returns the new blocks of each group that has some, and blocks that copies have replaced
    because the row writes in them first.
    """
    tables = scheduled.sequence.block_tables
    copied = {destination for _, destination in scheduled.block_copies}
    grown = []
    for group, (table, num_known) in enumerate(zip(tables, row.num_blocks, strict=True)):
        first = _first_copied(table, copied, num_known)
        if first < len(table):
            grown.append(Grown(row.number, group, first, pack(table[first:])))
        row.num_blocks[group] = len(table)
    row.num_all_blocks = sum(row.num_blocks)
    return grown


def _first_copied(table: Ordered[int], copied: set[int], num_known: int) -> int:
    """Returns the index of the first block that a row does not know."""
    if not copied:
        return num_known
    return next((i for i in range(num_known) if table[i] in copied), num_known)


def _new_row(number: int, sequence: Sequence) -> NewRow:
    params = sequence.sampling
    if params is not None and sequence.grammar is not None:
        params = msgspec.structs.replace(params, grammar=None, thinking=None)
    needs_history = params is not None and (params.is_penalized or bool(params.bad_words))
    return NewRow(
        row=number,
        sequence_id=sequence.sequence_id,
        tables=tuple(map(pack, sequence.block_tables)),
        num_prompt_tokens=sequence.num_prompt_tokens,
        choice_index=sequence.choice_index,
        sampling=params,
        pooling=sequence.pooling,
        stop_token_ids=tuple(sequence.stop_token_ids),
        has_grammar=sequence.grammar is not None,
        history=pack(sequence.token_ids) if needs_history else b"",
    )
