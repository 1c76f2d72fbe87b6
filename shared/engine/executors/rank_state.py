"""Keeps the rows of a rank: applies plans, and builds the inputs of each step from them.

Pure: no device, no clock. Every rank that applies the same plans, and records the same tokens,
builds the same inputs. An executor in one process is the only rank of its plans.

A row's arrays stay in place, so a decode step gathers them instead of building them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.engine.executors.special_rows import (
    SampledRow,
    SpecialRow,
    has_extras,
    sampling_extras,
)
from shared.engine.step import (
    SAMPLING_ROW,
    EmbeddedTokens,
    PoolingInputs,
    PromptSuccessors,
    SamplingInputs,
    StepInputs,
    StepOutput,
    TokenMask,
)
from shared.engine.step_plan import Fed, NewRow, StepPlan, unpack
from shared.errors import StepFailed
from shared.messages import SamplingParams

_ROW = np.dtype(
    [
        ("last_id", np.int64),  # sampled last
        ("num_prompt_tokens", np.int64),
        ("samples", np.bool_),
        ("has_extras", np.bool_),
        ("sampling", SAMPLING_ROW),
    ]
)
_FEWEST_ROWS, _FEWEST_BLOCKS = 16, 16

Integers = NDArray[np.int64]


class Recording(NamedTuple):
    """The rows whose results of a step are to be recorded."""

    sampled: Integers  # [R] in the order of its tokens
    pooled: Mapping[int, tuple[int, int]]  # index in the step -> row, its tokens so far


class RankState:
    def __init__(self, block_size: int, num_groups: int) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._clear()
        self._special: dict[int, SpecialRow] = {}
        self._sampled_rows = np.zeros(0, dtype=np.int64)  # rows of the last plan that sample
        self._pooled: dict[int, tuple[int, int]] = {}  # index in the last plan -> row, its tokens
        self.next_step = 0  # the number of the plan to be applied next

    def _clear(self) -> None:
        """Restores the state before the first row."""
        self._rows = np.zeros(_FEWEST_ROWS, dtype=_ROW)
        shape = (self._num_groups, _FEWEST_ROWS, _FEWEST_BLOCKS)
        self._tables = np.zeros(shape, dtype=np.int64)  # 0 after the end of each row's blocks
        self._num_blocks = np.zeros(shape[:2], dtype=np.int64)

    @property
    def recording(self) -> Recording:
        """The rows of the last plan whose results are to be recorded."""
        return Recording(self._sampled_rows, self._pooled)

    def apply(
        self, plan: StepPlan, masks: Sequence[TokenMask] = (), unread: Recording | None = None
    ) -> StepInputs:
        """Applies a plan; `masks` belong to its masked rows. The tokens of earlier steps that the
        plan does not feed must have been recorded, except those of the step before it if that is
        `unread`: as in `StepInputs.input_ids`. A plan that raises counts as one that has not come.

        Raises StepFailed for a plan that does not follow the last one: this rank has lost one, or
        is another worker's.
        """
        if plan.step != self.next_step:
            raise StepFailed(f"plan {plan.step} came, expected plan {self.next_step}")
        self._update(plan)
        rows, starts, query_lens = map(unpack, (plan.rows, plan.starts, plan.num_tokens))
        inputs = self._inputs(plan, masks, rows, starts, query_lens, unread)
        self.next_step += 1
        return inputs

    def needs_output(self, plan: StepPlan) -> bool:
        """Whether a plan is launched once the output of the step before it is there: it has a row
        with penalties, sums or the like, whose inputs depend on more than tokens, or whose launch
        waits for its own results, so that this output would come after them.
        """
        if plan.successors or any(map(_is_special, plan.new)):
            return True
        special = self._special
        return bool(special) and not special.keys().isdisjoint(unpack(plan.rows).tolist())

    def record(self, output: StepOutput, recording: Recording | None = None) -> None:
        """Records what a step sampled and pooled, by default that of the last plan. Steps are
        recorded in order. Rows that have ended since take a token without meaning.
        """
        sampled, pooled = self.recording if recording is None else recording
        if output.token_ids:  # empty if another rank samples
            kept = sampled < len(self._rows)
            self._rows["last_id"][sampled[kept]] = np.array(output.token_ids)[kept]
        for index, (row, num_tokens) in pooled.items():
            special = self._special.get(row)
            if special is not None:
                special.pooled, special.num_pooled_tokens = output.pooled.get(index), num_tokens

    def end(self, rows: bytes) -> None:
        """Forgets rows that have ended: tokens, options, blocks."""
        for row in unpack(rows).tolist():
            self._forget(row)
        if len(rows) and not self._num_blocks.any():
            self._clear()  # the arrays are large after a long row or many

    def _update(self, plan: StepPlan) -> None:
        self.end(plan.ended)
        for new in plan.new:
            self._add(new)
        for grown in plan.grown:
            self._write_table(grown.group, grown.row, grown.first_index, unpack(grown.block_ids))

    def _add(self, new: NewRow) -> None:
        if new.row >= len(self._rows):
            rows = _with_length(self._rows, new.row + 1)
            num_blocks = _with_length(self._num_blocks, len(rows), axis=1)
            self._widen_tables(len(rows), self._tables.shape[2])
            self._rows, self._num_blocks = rows, num_blocks
        self._forget(new.row)
        params = new.sampling
        row = self._rows[new.row]
        row["num_prompt_tokens"] = new.num_prompt_tokens
        row["samples"] = params is not None
        row["has_extras"] = False
        if params is not None:
            row["sampling"] = _sampling_row(params, new.choice_index)
            row["has_extras"] = has_extras(params, has_grammar=new.has_grammar)
        if _is_special(new):
            self._special[new.row] = SpecialRow(
                params,
                new.pooling,
                new.num_prompt_tokens,
                new.stop_token_ids,
                unpack(new.history).tolist(),
            )
        for group, table in enumerate(new.tables):
            self._write_table(group, new.row, 0, unpack(table))

    def _write_table(self, group: int, row: int, first: int, block_ids: Integers) -> None:
        end = first + len(block_ids)
        width = self._tables.shape[2]
        if end > width:
            self._widen_tables(len(self._rows), max(end, 2 * width))
        table = self._tables[group, row]
        table[first:end] = block_ids
        table[end : self._num_blocks[group, row]] = 0
        self._num_blocks[group, row] = end

    def _widen_tables(self, num_rows: int, width: int) -> None:
        """Copies what the rows hold alone: one may be very much longer than the others."""
        before = self._tables
        self._tables = np.zeros((self._num_groups, num_rows, width), dtype=np.int64)
        for group, row in np.argwhere(self._num_blocks).tolist():
            end = self._num_blocks[group, row]
            self._tables[group, row, :end] = before[group, row, :end]

    def _forget(self, row: int) -> None:
        self._special.pop(row, None)
        if row >= len(self._rows):  # the plan of the row has not come
            return
        self._rows[row] = np.zeros((), dtype=_ROW)
        for group in range(self._num_groups):
            self._tables[group, row, : self._num_blocks[group, row]] = 0
        self._num_blocks[:, row] = 0

    def _inputs(
        self,
        plan: StepPlan,
        masks: Sequence[TokenMask],
        rows: Integers,
        starts: Integers,
        query_lens: Integers,
        unread: Recording | None,
    ) -> StepInputs:
        kept = self._rows.take(rows)  # much faster than by index, for records
        context_lens = starts + query_lens
        num_tokens = int(query_lens.sum())
        row_of_token = np.arange(len(rows))
        last_ids = kept["last_id"] if unread is None else _unread_ids(kept, rows, unread.sampled)
        ends, positions, input_ids = row_of_token + 1, starts, last_ids.copy()
        if num_tokens > len(rows):
            ends = query_lens.cumsum()
            row_of_token = row_of_token.repeat(query_lens)
            positions = np.arange(num_tokens) + (context_lens - ends)[row_of_token]
            input_ids = np.zeros(num_tokens, dtype=np.int64)
            input_ids[ends - 1] = last_ids
        _feed(input_ids, plan.fed, rows, ends)
        self._extend_histories(rows, ends, context_lens, input_ids)
        tables = self._tables_of(rows)
        block_indices, offsets = np.divmod(positions, self._block_size)
        blocks = _blocks_of(tables, row_of_token, block_indices)
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=blocks * self._block_size + offsets,
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=tables,
            sampling=self._sampling(plan, masks, rows, kept, ends - 1, context_lens),
            block_copies=plan.copies,
            prompt_logprobs=_prompt_logprobs(plan, rows),
            pooling=self._pooling(plan, rows, starts, context_lens),
            embedded=_embedded(plan, rows, ends - query_lens),
        )

    def _tables_of(self, rows: Integers) -> Integers:
        """[G, S, max_blocks] padded with 0."""
        width = int(self._num_blocks.take(rows, axis=1).max())
        if len(self._tables) == 1:  # a view: less time than by index in three dimensions
            table: Integers = self._tables[0][rows, :width]
            return table[None]
        tables: Integers = self._tables[:, rows, :width]
        return tables

    def _extend_histories(
        self, rows: Integers, ends: Integers, context_lens: Integers, input_ids: Integers
    ) -> None:
        if not self._special:
            return
        for row, end, length in zip(
            rows.tolist(), ends.tolist(), context_lens.tolist(), strict=True
        ):
            special = self._special.get(row)
            if special is None:
                continue
            special.num_output_tokens = length - special.num_prompt_tokens
            num_new = length - len(special.token_ids)
            if special.token_ids and num_new > 0:
                special.token_ids += input_ids[end - num_new : end].tolist()

    def _sampling(
        self,
        plan: StepPlan,
        masks: Sequence[TokenMask],
        rows: Integers,
        kept: NDArray[np.void],
        last: Integers,
        context_lens: Integers,
    ) -> SamplingInputs:
        """Builds the inputs of sampling. `kept` [S] is the state of the rows; `last` [S] is the
        index of each row's last token.
        """
        samples = np.frombuffer(plan.completes, dtype=np.bool_) & kept["samples"]
        sampled = np.flatnonzero(samples)
        if len(sampled) < len(rows):
            rows, kept, last = rows[sampled], kept.take(sampled), last[sampled]
            context_lens = context_lens[sampled]
        self._sampled_rows, packed = rows, kept["sampling"]
        requesting = self._requesting(plan, masks, kept["has_extras"])
        packed["output_position"] = context_lens - kept["num_prompt_tokens"]
        extras = sampling_extras(requesting) if requesting else {}
        return SamplingInputs(last, packed, **extras)

    def _requesting(
        self, plan: StepPlan, masks: Sequence[TokenMask], has_extras: NDArray[np.bool_]
    ) -> list[SampledRow]:
        if not has_extras.any():
            return []
        mask_of = dict(zip(unpack(plan.masked).tolist(), masks, strict=True))
        bans_stop = set(unpack(plan.bans_stop).tolist())
        requesting: list[SampledRow] = []
        for index in np.flatnonzero(has_extras).tolist():
            row = int(self._sampled_rows[index])
            special = self._special[row]
            assert special.sampling is not None
            special.mask, special.bans_stop = mask_of.get(row), row in bans_stop
            requesting.append((index, special, special.sampling))
        return requesting

    def _pooling(
        self, plan: StepPlan, rows: Integers, starts: Integers, context_lens: Integers
    ) -> dict[int, PoolingInputs]:
        """Returns the pooling of a row. A mean needs every chunk; the last token is in the last
        chunk. If an earlier chunk failed, the row's result is void.
        """
        self._pooled = {}
        found: dict[int, PoolingInputs] = {}
        if not self._special:
            return found
        sums = {each.row: np.frombuffer(each.sum) for each in plan.pooled}
        for index, row in enumerate(rows.tolist()):
            special = self._special.get(row)
            if special is None or special.pooling is None:
                continue
            if special.pooling == "mean" or plan.completes[index]:
                start, before = int(starts[index]), sums.get(row)
                if before is None and 0 < start == special.num_pooled_tokens:
                    before = special.pooled
                found[index] = PoolingInputs(special.pooling, before)
                self._pooled[index] = row, int(context_lens[index])
        return found


def _is_special(new: NewRow) -> bool:
    params = new.sampling
    if params is None:
        return new.pooling is not None
    return has_extras(params, has_grammar=new.has_grammar)


def _sampling_row(params: SamplingParams, choice_index: int) -> tuple[float | int, ...]:
    """Returns the fields of `SAMPLING_ROW`."""
    return (
        *(params.temperature, params.top_p, params.min_p, params.top_k, params.seed),
        choice_index,
        0,
    )


def _prompt_logprobs(plan: StepPlan, rows: Integers) -> dict[int, PromptSuccessors]:
    if not plan.successors:
        return {}
    index_of = {row: index for index, row in enumerate(rows.tolist())}
    return {
        index_of[each.row]: PromptSuccessors(unpack(each.token_ids), each.num_top_logprobs)
        for each in plan.successors
    }


def _embedded(plan: StepPlan, rows: Integers, firsts: Integers) -> EmbeddedTokens | None:
    """`firsts` [S] is the place of each row's first token in the flat batch."""
    if not plan.embedded:
        return None
    first_of = dict(zip(rows.tolist(), firsts.tolist(), strict=True))
    places = [first_of[each.row] + unpack(each.offsets) for each in plan.embedded]
    vectors = b"".join(each.vectors for each in plan.embedded)
    return EmbeddedTokens(np.concatenate(places), vectors)


def _unread_ids(kept: NDArray[np.void], rows: Integers, sampled: Integers) -> Integers:
    """[S] the last token of each row: -1 - its place among those that the step before samples."""
    place_of = {row: place for place, row in enumerate(sampled.tolist())}
    last_ids = kept["last_id"].tolist()
    return np.array(
        [
            -1 - place_of[row] if row in place_of else token_id
            for row, token_id in zip(rows.tolist(), last_ids, strict=True)
        ],
        dtype=np.int64,
    )


def _feed(input_ids: Integers, fed: tuple[Fed, ...], rows: Integers, ends: Integers) -> None:
    """Writes the tokens that rows have not sampled."""
    if not fed:
        return
    end_of = dict(zip(rows.tolist(), ends.tolist(), strict=True))
    for each in fed:
        token_ids = unpack(each.token_ids)
        end = end_of[each.row]
        input_ids[end - len(token_ids) : end] = token_ids


def _blocks_of(tables: Integers, row_of_token: Integers, block_indices: Integers) -> Integers:
    """[G, T] the block of each token."""
    if len(tables) == 1:
        blocks: Integers = tables[0][row_of_token, block_indices]
        return blocks[None]
    of_groups: Integers = tables[:, row_of_token, block_indices]
    return of_groups


def _with_length(values: np.ndarray, length: int, *, axis: int = 0) -> np.ndarray:
    """Returns `values`, or a copy at least twice as long with zeros at its end."""
    missing = length - values.shape[axis]
    if missing <= 0:
        return values
    pads = [(0, 0)] * values.ndim
    pads[axis] = (0, max(missing, values.shape[axis]))
    return np.pad(values, pads)
