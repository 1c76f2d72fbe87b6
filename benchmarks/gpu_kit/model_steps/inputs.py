"""Steps of a model with a given number of sequences and tokens, all sampling greedily."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.engine.step import SamplingInputs, StepInputs, sampling_rows

Integers = NDArray[np.int64]


def decode_step(batch: int, context: int, block_size: int) -> StepInputs:
    """Returns one new token for each sequence, at the end of its context, in scattered blocks."""
    width = -(-context // block_size)
    blocks = np.random.default_rng(0).permutation(batch * width)
    tables = blocks.reshape(batch, width)
    last = context - 1
    return _step(
        positions=np.full(batch, last),
        slots=tables[:, last // block_size] * block_size + last % block_size,
        query_lens=np.ones(batch, dtype=np.int64),
        context_lens=np.full(batch, context),
        tables=tables,
        logits_indices=np.arange(batch),
    )


def after_another(step: StepInputs) -> StepInputs:
    """Returns a decode step whose tokens are those that the step before it samples."""
    return msgspec.structs.replace(step, input_ids=-1 - np.arange(len(step.input_ids)))


def prefill_step(start: int, num_tokens: int, block_size: int) -> StepInputs:
    """Returns a prompt's tokens [start, start + num_tokens), in consecutive blocks;
    the last samples.
    """
    end = start + num_tokens
    return _step(
        positions=np.arange(start, end),
        slots=np.arange(start, end),
        query_lens=np.array([num_tokens]),
        context_lens=np.array([end]),
        tables=np.arange(-(-end // block_size))[None],
        logits_indices=np.array([num_tokens - 1]),
    )


def mixed_step(batch: int, context: int, num_tokens: int, block_size: int) -> StepInputs:
    """Returns a decode step of the batch, and beside it the last tokens of a prompt as long as its
    contexts, in blocks of its own.
    """
    single = decode_step(batch, context, block_size)
    several = prefill_step(context - num_tokens, num_tokens, block_size)
    first = single.block_tables.size  # block of the prompt
    slots = several.slot_mapping[0] + first * block_size
    return _step(
        positions=np.concatenate((single.positions, several.positions)),
        slots=np.concatenate((single.slot_mapping[0], slots)),
        query_lens=np.concatenate((single.query_lens, several.query_lens)),
        context_lens=np.concatenate((single.context_lens, several.context_lens)),
        tables=np.concatenate((single.block_tables[0], several.block_tables[0] + first)),
        logits_indices=np.append(np.arange(batch), batch + num_tokens - 1),
    )


def prefill_steps(num_tokens: int, chunk: int, block_size: int) -> list[StepInputs]:
    """Returns a prompt in chunks."""
    starts = range(0, num_tokens, chunk)
    return [prefill_step(start, min(chunk, num_tokens - start), block_size) for start in starts]


def _step(
    *,
    positions: Integers,
    slots: Integers,
    query_lens: Integers,
    context_lens: Integers,
    tables: Integers,
    logits_indices: Integers,
) -> StepInputs:
    return StepInputs(
        input_ids=np.random.default_rng(1).integers(3, 500, len(positions)),
        positions=positions,
        slot_mapping=slots[None],
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables[None],
        sampling=SamplingInputs(logits_indices, sampling_rows(len(logits_indices))),
    )
