"""From the step's rows to the flat arrays that a runner computes with."""

from __future__ import annotations

import numpy as np

from shared.engine.batcher import ScheduledSequence
from shared.engine.runner import SamplingInputs, StepInputs
from shared.messages import SamplingParams


def build_inputs(rows: list[ScheduledSequence], block_size: int) -> StepInputs:
    """Shapes as in `StepInputs`; sequences keep the order of `rows`."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    width = max(len(row.sequence.block_table) for row in rows)
    block_tables = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        sequence, start = row.sequence, row.sequence.num_computed_tokens
        end = start + row.num_scheduled_tokens
        table = sequence.block_table
        block_tables[index, : len(table)] = table
        input_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
    query_lens = np.array([row.num_scheduled_tokens for row in rows], dtype=np.int64)
    computed = np.array([row.sequence.num_computed_tokens for row in rows], dtype=np.int64)
    return StepInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_lens=query_lens,
        context_lens=computed + query_lens,
        block_tables=block_tables,
        sampling=_sampling_inputs(rows, np.cumsum(query_lens) - 1),
    )


def _sampling_inputs(rows: list[ScheduledSequence], last_rows: np.ndarray) -> SamplingInputs:
    drawing: list[tuple[int, ScheduledSequence, SamplingParams]] = [
        (index, row, row.sequence.sampling)
        for index, row in enumerate(rows)
        if row.samples and row.sequence.sampling is not None
    ]
    params = [each for _, _, each in drawing]
    sequences = [row.sequence for _, row, _ in drawing]
    banned = [
        (draw, token_id)
        for draw, sequence in enumerate(sequences)
        if sequence.num_output_tokens < params[draw].min_tokens
        for token_id in sequence.stop_token_ids
    ]
    return SamplingInputs(
        logits_indices=last_rows[[index for index, _, _ in drawing]].astype(np.int64),
        temperature=np.array([each.temperature for each in params], dtype=np.float32),
        top_k=np.array([each.top_k for each in params], dtype=np.int64),
        top_p=np.array([each.top_p for each in params], dtype=np.float32),
        min_p=np.array([each.min_p for each in params], dtype=np.float32),
        seed=np.array([each.seed for each in params], dtype=np.uint64),
        choice_index=np.array([each.choice_index for each in sequences], dtype=np.int64),
        output_position=np.array([each.num_output_tokens for each in sequences], dtype=np.int64),
        banned=banned,
    )
