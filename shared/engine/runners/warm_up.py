"""Steps without side effects, which run before a worker is ready."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.engine.runner import SamplingInputs, StepInputs


def idle_step(
    block_size: int, query_lens: Sequence[int], *, temperature: float = 0.0
) -> StepInputs:
    """A prompt of each length, or a decode for length 1, each sampling one token.

    All read block 0 and write nothing, so one block of cache is enough.
    """
    num_rows, num_tokens = len(query_lens), sum(query_lens)
    lens = np.array(query_lens, dtype=np.int64)
    return StepInputs(
        input_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.zeros(num_tokens, dtype=np.int64),
        slot_mapping=np.full(num_tokens, -1, dtype=np.int64),
        query_lens=lens,
        context_lens=lens,
        block_tables=np.zeros((num_rows, -(-max(query_lens) // block_size)), dtype=np.int64),
        sampling=SamplingInputs(
            logits_indices=np.cumsum(lens) - 1,
            temperature=np.full(num_rows, temperature, dtype=np.float32),
            top_k=np.zeros(num_rows, dtype=np.int64),
            top_p=np.ones(num_rows, dtype=np.float32),
            min_p=np.zeros(num_rows, dtype=np.float32),
            seed=np.zeros(num_rows, dtype=np.uint64),
            choice_index=np.zeros(num_rows, dtype=np.int64),
            output_position=np.zeros(num_rows, dtype=np.int64),
        ),
    )
