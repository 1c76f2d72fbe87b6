"""Steps without side effects, for the time before a worker is ready.

Triton compiles a kernel for each combination of its constants. `warm_up_steps` and `sampled_steps`
need all those that a worker's steps can need, so that no request waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.engine.step import (
    Penalties,
    PoolingInputs,
    PromptSuccessors,
    SamplingInputs,
    StepInputs,
    TokenMasks,
    sampling_rows,
)

# More tokens than one segment of attention: parts of a context are computed apart, and joined.
LONG_CONTEXT = 2048
CHECKED_LENS = (1, 2)  # of the step that checks a device: a decode and a prompt
MAX_TOP_LOGPROBS = 20
COPIES = (1, 9, 65)  # numbers of blocks, one for each size of the kernel


def warm_up_steps(
    block_size: int,
    row_counts: Iterable[int],
    *,
    max_batch_tokens: int,
    max_sequences: int,
    num_groups: int = 1,
) -> Iterator[StepInputs]:
    """Yields steps that compile all kernels. `row_counts` are numbers of tokens that between them
    need every kernel.
    """
    num_rows = min(max_sequences, max_batch_tokens)
    idle = partial(idle_step, block_size, num_groups=num_groups)
    for count in sorted({*row_counts, num_rows}):
        if count <= num_rows:
            yield idle([1] * count)
            yield idle([1] * count, context_tokens=LONG_CONTEXT)
        if 1 < count <= max_batch_tokens:
            yield idle([count])
    yield idle([max_batch_tokens], context_tokens=LONG_CONTEXT)
    yield idle([1] * num_rows, temperature=1.0)


def largest_step(
    block_size: int,
    *,
    max_batch_tokens: int,
    max_sequences: int,
    max_context_tokens: int,
    num_groups: int = 1,
) -> StepInputs:
    """Returns the step that takes the most memory: as many decodes as there can be, which sample
    after a long context, the first one after the longest, and a prompt: parts of attention's sums
    are as many for each.
    """
    num_decodes = min(max_sequences, max_batch_tokens) - 1
    return idle_step(
        block_size,
        [*[1] * num_decodes, max_batch_tokens - num_decodes],
        temperature=1.0,
        context_tokens=LONG_CONTEXT,
        first_context_tokens=max_context_tokens if num_decodes else 0,
        num_groups=num_groups,
    )


def idle_step(
    block_size: int,
    query_lens: Sequence[int],
    *,
    temperature: float = 0.0,
    context_tokens: int = 0,
    first_context_tokens: int = 0,
    num_groups: int = 1,
) -> StepInputs:
    """Returns a prompt of each length, or a decode for length 1, each sampling one token after at
    least `context_tokens`, the first one after `first_context_tokens`.

    All read block 0 and write nothing, so one block of cache is enough.
    """
    num_rows, num_tokens = len(query_lens), sum(query_lens)
    lens = np.array(query_lens, dtype=np.int64)
    context_lens = np.maximum(lens, context_tokens)
    context_lens[0] = max(context_lens[0], first_context_tokens)
    width = -(-int(context_lens.max()) // block_size)
    return StepInputs(
        input_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.zeros(num_tokens, dtype=np.int64),
        slot_mapping=np.full((num_groups, num_tokens), -1, dtype=np.int64),
        query_lens=lens,
        context_lens=context_lens,
        block_tables=np.zeros((num_groups, num_rows, width), dtype=np.int64),
        sampling=SamplingInputs(
            logits_indices=np.cumsum(lens) - 1,
            rows=sampling_rows(num_rows, temperature=temperature),
        ),
    )


def batch_sizes(limit: int) -> Iterator[int]:
    """Powers of 2 with their successors: there decode attention, and GEMMs with compressed
    weights, change to another kernel.
    """
    size = 1
    while size < limit:
        yield from (size, size + 1)
        size *= 2


def sampled_steps(block_size: int, vocab_size: int, *, num_groups: int = 1) -> Iterator[StepInputs]:
    """Returns a row of two tokens: with penalties, with a mask, with logprobs, as an embedding."""
    step = idle_step(block_size, [2], temperature=1.0, num_groups=num_groups)
    entry = np.zeros(1, dtype=np.int64)
    value = np.ones(1, dtype=np.float32)
    penalties = Penalties(entry, entry, repetition=value, subtracted=value)
    yield _with_sampling(step, penalties=penalties)
    yield _with_sampling(step, masks=TokenMasks(entry, (AllTokens(vocab_size),)))
    for num_top in range(MAX_TOP_LOGPROBS + 1):
        yield _with_sampling(step, raw_logprobs={0: num_top})
    yield msgspec.structs.replace(step, prompt_logprobs={0: PromptSuccessors(entry, 1)})
    yield msgspec.structs.replace(step, pooling={0: PoolingInputs("mean", None)})


def logprobs_step(block_size: int, num_rows: int, *, num_groups: int = 1) -> StepInputs:
    """Returns a step of `num_rows` rows that each request all log-probabilities a request may have.

    Raw and processed log-probabilities each copy the logits of all rows.
    """
    step = idle_step(block_size, [1] * num_rows, temperature=1.0, num_groups=num_groups)
    wanted = dict.fromkeys(range(num_rows), MAX_TOP_LOGPROBS)
    return _with_sampling(step, raw_logprobs=wanted, processed_logprobs=wanted)


class AllTokens:
    """A mask that allows every token."""

    def __init__(self, vocab_size: int) -> None:
        self._words = np.full(-(-vocab_size // 32), -1, dtype=np.int32)

    def wait(self, timeout_s: float) -> NDArray[np.int32]:
        return self._words


def _with_sampling(step: StepInputs, **fields: object) -> StepInputs:
    return msgspec.structs.replace(step, sampling=msgspec.structs.replace(step.sampling, **fields))
