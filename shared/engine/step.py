"""One step as flat arrays, and its result: what whatever computes a step takes and returns.

A model computes it (torch) or a formula with a cost model (`TimingExecutor`). Both get the same
inputs, so batching, the block pool and the KV paths are the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.kv_layout import KvLayout, KvShard
from shared.messages import Pooling, TokenLogprobs
from shared.numerics import Numerics

if TYPE_CHECKING:
    from shared.kv_wire.link import PageLock


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to the logits of single tokens (B of them)."""

    rows: NDArray[np.int64]  # [B]
    token_ids: NDArray[np.int64]  # [B]
    values: NDArray[np.float32]  # [B]


@dataclass(frozen=True, slots=True)
class Penalties:
    """One entry for each distinct token of each row with penalties (P entries)."""

    rows: NDArray[np.int64]  # [P]
    token_ids: NDArray[np.int64]  # [P]
    repetition: NDArray[np.float32]  # [P] divisor of a positive logit
    subtracted: NDArray[np.float32]  # [P] frequency and presence penalty; 0 outside the output


class TokenMask(Protocol):
    """The tokens that a grammar allows one row to sample next; computed on another thread."""

    def wait(self, timeout_s: float) -> NDArray[np.int32] | None:
        """Returns the words [⌈V/32⌉], bit i of word w for token 32 w + i, or None if they are not
        ready in time. May be called from any thread, and again.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of M rows; each row's mask is `masks[i]`."""

    rows: NDArray[np.int64]  # [M]
    masks: tuple[TokenMask, ...]


SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),  # 0 = greedy
        ("top_p", np.float32),  # 1 = off
        ("min_p", np.float32),  # 0 = off
        ("top_k", np.int64),  # 0 = off
        ("seed", np.uint64),
        ("choice_index", np.int64),
        ("output_position", np.int64),  # index of the token to be sampled
    ],
    align=True,  # so that each column is an array of its own type for torch
)


def sampling_rows(num_rows: int, **columns: object) -> NDArray[np.void]:
    """Returns greedy rows, except for `columns`, which has values by field of `SAMPLING_ROW`."""
    rows = np.zeros(num_rows, dtype=SAMPLING_ROW)
    for name, values in {"top_p": 1, **columns}.items():
        rows[name] = values
    return rows


class SamplingInputs(msgspec.Struct, frozen=True):
    """One row for each sequence that samples in this step (R rows)."""

    logits_indices: NDArray[np.int64]  # [R] its last token's row in the flat batch
    rows: NDArray[np.void]  # [R] of `SAMPLING_ROW`
    # (row, token id) pairs that must not be sampled: stop tokens before min_tokens, bad words
    banned: list[tuple[int, int]] = []
    masks: TokenMasks | None = None
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    # row -> number of top tokens to return besides the sampled one, by `LogprobsMode`
    raw_logprobs: Mapping[int, int] = {}
    processed_logprobs: Mapping[int, int] = {}

    @property
    def num_rows(self) -> int:
        return len(self.logits_indices)

    @property
    def is_plain(self) -> bool:
        """Whether nothing changes the logits, and no row has logprobs."""
        is_touched = self.banned or self.bias is not None or self.penalties is not None
        is_touched = is_touched or self.masks is not None
        return not (is_touched or self.raw_logprobs or self.processed_logprobs)

    @property
    def is_plain_greedy(self) -> bool:
        return self.is_plain and not self.rows["temperature"].any()


class PromptSuccessors(msgspec.Struct, frozen=True):
    """The prompt tokens that follow the first N tokens of a chunk; the last is not part of it."""

    token_ids: NDArray[np.int64]  # [N]
    num_top_logprobs: int  # number of top tokens to return besides each


class PoolingInputs(msgspec.Struct, frozen=True):
    how: Pooling
    before: NDArray[np.float64] | None  # `StepOutput.pooled` of the previous chunk


class EmbeddedTokens(msgspec.Struct, frozen=True):
    """Vectors that N tokens of a step have in place of the embeddings of their ids."""

    rows: NDArray[np.int64]  # [N] of the flat batch
    vectors: bytes  # [N, hidden_size] in the model's dtype


class StepInputs(msgspec.Struct, frozen=True):
    """One engine step over S sequences with T new tokens in all, flat in batch order, for a model
    whose layers form G groups. Sequences with a single new token come first.
    """

    # [T] -1 - i: the token i that the step before samples, which is not known when this one starts
    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [G, T] block_id * block_size + offset; -1 = skip
    query_lens: NDArray[np.int64]  # [S] new tokens of each sequence; sums to T
    context_lens: NDArray[np.int64]  # [S] KV length once this step is done
    # [G, S, max_blocks]; 0 after the end, anything before the first block that a token sees
    block_tables: NDArray[np.int64]
    sampling: SamplingInputs
    # (source, destination) blocks to copy, all slots, before any other write
    block_copies: tuple[tuple[int, int], ...] = ()
    # sequence -> the tokens whose logprobs to return
    prompt_logprobs: Mapping[int, PromptSuccessors] = {}
    pooling: Mapping[int, PoolingInputs] = {}  # key: sequence
    embedded: EmbeddedTokens | None = None  # tokens of images


class StepOutput(msgspec.Struct, frozen=True):
    """The result of one step."""

    token_ids: list[int]  # [R] sampled
    logprobs: list[TokenLogprobs | None] = []  # [R], or empty
    # sequence -> logprobs of all its successors, of the model's distribution
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = {}
    # sequence -> [hidden_size] after the final norm: the sum over its tokens so far, or its last
    pooled: Mapping[int, NDArray[np.float64]] = {}
    # Rows of R whose masks came late: their tokens are void
    late_rows: frozenset[int] = frozenset()


class KvRun(msgspec.Struct, frozen=True):
    """Tokens [first_token, first_token + num_tokens) of a group of layers, whose block table it is.

    `shard` has some of the group's layers and heads, counted in it; None means all that
    a memory holds.
    """

    block_table: Sequence[int]
    first_token: int
    num_tokens: int
    group: int = 0
    shard: KvShard | None = None


class KvMemory(Protocol):
    """The paged cache of a process: all of the model's KV, or one rank's part of it."""

    kv_layout: KvLayout  # layout of the whole model
    numerics: Numerics
    page_lock: PageLock | None  # of memory from and to which a device copies KV, if there is one

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        """Copies the KV of the run into `out`."""
        ...

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        """The reverse of `read_kv`. The blocks must not be part of a running step."""
        ...
