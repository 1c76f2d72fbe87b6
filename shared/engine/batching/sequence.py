"""The engine's record of one sequence, and the states it goes through.

RESERVED   decode holds blocks for KV that another worker computes
WAITING    wants to compute, holds no blocks (or was just given its KV)
RUNNING    in the batch: `num_computed_tokens` catches up with `num_tokens`
HELD       a prefill that is done; its blocks stay until their push is acknowledged, or until the
           choices of the request start from them
FINISHED   holds nothing; an embedding gets there by "stop" once its last token is computed

RESERVED ──activate──▶ WAITING ──admit──▶ RUNNING ──stop, length──▶ FINISHED
                        │ ▲                 │ └──prefill done──▶ HELD ──release, fork──▶ FINISHED
                        │ └────preempt──────┘                     ▲
                        └──all of a prefill is here, or cached────┘
every state ──abort──▶ FINISHED
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.block_hash import root_after_public
from shared.engine.sampling.token_counts import TokenCounts
from shared.messages import (
    PinPrefix,
    Pooling,
    Request,
    RunPrefill,
    SamplingParams,
    TokenLogprobs,
)
from shared.packing import unpack_hashes


class SequenceState(Enum):
    RESERVED = "reserved"
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


_S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.RESERVED: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.HELD, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.HELD, _S.FINISHED}),
    _S.HELD: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Prompt and output of one choice. With `pooling` instead of `sampling` it is an embedding,
    with neither a prefill: both never draw.

    `block_hashes` are those of the full blocks of `token_ids` known so far; the chain grows as
    blocks fill up.
    """

    sequence_id: bytes
    tenant_id: str
    cache_root: bytes
    token_ids: list[int]
    num_prompt_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    num_public_blocks: int = 0  # leading ones, of a public prefix; all their hashes are known
    sampling: SamplingParams | None = None
    pooling: Pooling | None = None
    choice_index: int = 0
    kv_quota_tokens: int = 0  # of the cache, for all of its tenant's; 0: no bound
    stop_token_ids: frozenset[int] = frozenset()
    # how many likeliest tokens to tell at each prompt position; None: nothing. `sampling` has it,
    # too; a prefill may tell for its children, and also of the token that comes next in theirs
    num_prompt_logprobs: int | None = None
    next_token_id: int | None = None

    state: SequenceState = SequenceState.WAITING
    # 64-bit, so that every step's inputs take it in by one copy
    block_table: array[int] = field(default_factory=lambda: array("q"))
    num_computed_tokens: int = 0
    num_committed_blocks: int = 0  # leading blocks that the prefix cache knows
    num_dropped_blocks: int = 0  # leading blocks given back already: no later token sees them
    num_cached_tokens: int = 0  # found at the first admission
    num_preemptions: int = 0
    is_in_step: bool = False
    is_aborted: bool = False
    counts: TokenCounts = field(default_factory=TokenCounts, init=False)  # of whom penalties ask
    # of the second to the last computed prompt token; None: not asked for, or told
    prompt_logprobs: list[TokenLogprobs] | None = field(default=None, init=False)
    pooled: NDArray[np.float64] | None = field(default=None, init=False)  # so far
    # of `inputs.py`: its sampling as one packed row, and whether it has penalties, bans or logprobs
    packed_sampling: tuple[bytes, bool] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.sampling is not None:
            self.num_prompt_logprobs = self.sampling.num_prompt_logprobs
        if self.num_prompt_logprobs is not None:
            self.prompt_logprobs = []
        # both grow, and the choices of one request may be made from the same lists
        self.token_ids = list(self.token_ids)
        self.block_hashes = list(self.block_hashes)

    def parent_hash_of(self, block_index: int) -> bytes:
        """What the hash of this block chains from; those of all blocks before it are known."""
        if block_index == 0:
            return self.cache_root
        parent = self.block_hashes[block_index - 1]
        if block_index == self.num_public_blocks:  # nobody shares what a tenant adds
            return root_after_public(self.cache_root, parent)
        return parent

    @property
    def held_blocks(self) -> array[int]:
        """`block_table` keeps the places, and stale ids, of those that were dropped."""
        return self.block_table[self.num_dropped_blocks :]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens whose KV may come from elsewhere: of a cache, or of another worker.

        All but a prefill compute at least their last token themselves.
        """
        if self.needs_every_token:
            return 0
        return len(self.token_ids) - (0 if self.is_prefill_only else 1)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefill_only(self) -> bool:
        return self.sampling is None and self.pooling is None

    @property
    def needs_every_token(self) -> bool:
        """Whether what it asks for comes from all its prompt's tokens, also those in a cache."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    def transition_to(self, state: SequenceState) -> None:
        """Raises ValueError for a move that the diagram does not have."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"a sequence cannot go from {self.state.value} to {state.value}")
        self.state = state


def build_sequence(
    message: Request | RunPrefill | PinPrefix,
    token_ids: list[int],
    *,
    sequence_id: bytes,
    num_blocks: int | None = None,
    **fields: Any,
) -> Sequence:
    """The sequence that computes `token_ids` for the tenant and cache root of a message.

    `num_blocks`: full blocks of `token_ids` where these end before the message's prompt does.
    `fields` are the others of `Sequence`; without `sampling` and `pooling` it is a prefill.
    """
    fields = {"num_prompt_tokens": len(token_ids), **fields}
    num_public_blocks = message.num_public_blocks
    if num_blocks is not None:
        num_public_blocks = min(num_public_blocks, num_blocks)
    return Sequence(
        sequence_id=sequence_id,
        tenant_id=message.tenant_id,
        cache_root=message.cache_root,
        token_ids=token_ids,
        block_hashes=unpack_hashes(message.block_hashes)[:num_blocks],
        num_public_blocks=num_public_blocks,
        **fields,
    )
