"""The engine's record of one sequence, and its states.

RESERVED   decode holds blocks for KV that another worker computes
WAITING    queued; holds no blocks (or has just received its KV)
RUNNING    in the batch: `num_computed_tokens` advances towards `num_tokens`
HELD       a finished prefill; it holds its blocks until their push is acknowledged, or until the
           choices of the request start from them
FINISHED   holds no blocks; an embedding ends with "stop" once its last token is computed

RESERVED ──activate──▶ WAITING ──admit──▶ RUNNING ──stop, length──▶ FINISHED
                        │ ▲                 │ └──prefill done──▶ HELD ──release, fork──▶ FINISHED
                        │ └────preempt──────┘                     ▲
                        └──a prefill's KV all received or cached──┘
every state ──abort──▶ FINISHED
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.block_hash import NO_EXTRAS, BlockExtras, root_after_public
from shared.engine.step import TokenMask
from shared.errors import HearthError
from shared.messages import (
    ImageParts,
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


PLACEMENT_ID_BYTES = 16

_S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.RESERVED: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.HELD, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.HELD, _S.FINISHED}),
    _S.HELD: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class SequenceGrammar(Protocol):
    """The grammar of one sequence, at its last token. Used on the event loop's thread alone."""

    @property
    def num_late_masks(self) -> int:
        """Number of calls of `sit_out`."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether its row must wait: it is being compiled, or its late mask is not ready yet."""
        ...

    @property
    def error(self) -> HearthError | None:
        """The reason that the sequence cannot continue; None: it can."""
        ...

    @property
    def bans_stop(self) -> bool:
        """Whether no stop token may be sampled next, although `mask` is None."""
        ...

    @property
    def num_free_tokens(self) -> int:
        """The number of next tokens that have no mask and no ban, whatever they are."""
        ...

    def mask(self) -> TokenMask | None:
        """Returns the mask of the next token, which is being computed already; None:
        all are allowed.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The sequence continues with this token; starts to compute the next mask."""
        ...

    def sit_out(self) -> None:
        """Skips a step for which the mask was late: `is_stalled` until the mask is ready."""
        ...


class ImageVectors(NamedTuple):
    """Vectors of N image tokens, which take the place of their embeddings."""

    offsets: NDArray[np.int64]  # [N] after the first token asked for
    vectors: bytes  # [N, hidden_size] in the model's dtype


class SequenceImages(Protocol):
    """The images of one request's prompt. Used on the event loop's thread alone."""

    @property
    def error(self) -> HearthError | None:
        """The reason that an image which a sequence waits for cannot be encoded; None: it can."""
        ...

    def num_ready(self, num_computed: int, start: int, count: int) -> int:
        """Returns how many of `count` tokens from `start` on have their vectors, and asks for those
        of the next images. Of the tokens before `num_computed` none is computed again soon.
        """
        ...

    def vectors(self, start: int, count: int) -> ImageVectors | None:
        """Returns the vectors of `count` tokens that are ready; None: no image is among them."""
        ...

    def close(self) -> None:
        """Drops what is still wanted, at the end of the sequence. Idempotent."""
        ...


class RowInFlight(Protocol):
    @property
    def num_scheduled_tokens(self) -> int: ...
    @property
    def samples(self) -> bool: ...


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class Sequence:
    """Prompt and output of one choice. With `pooling` instead of `sampling` it is an embedding,
    with neither a prefill; both sample no tokens.

    `block_hashes` are the known hashes of full blocks of `token_ids`; the chain grows as blocks
    fill.
    """

    sequence_id: bytes  # begins with the id of its placement, which the choices share
    tenant_id: str
    request_id: str = ""  # empty: of no request
    cache_root: bytes
    token_ids: list[int]
    num_prompt_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    num_public_blocks: int = 0  # leading ones, of a public prefix; all their hashes are known
    sampling: SamplingParams | None = None
    pooling: Pooling | None = None
    choice_index: int = 0
    is_zero_retention: bool = False  # its own KV is findable for no other sequence
    kv_quota_tokens: int = 0  # tokens of the cache, for the whole tenant; 0: unlimited
    region_class: str = ""  # that of the tenant
    stop_token_ids: frozenset[int] = frozenset()
    grammar: SequenceGrammar | None = None
    image_parts: ImageParts = ()
    images: SequenceImages | None = None  # their vectors; None: it has no images
    block_extras: BlockExtras = field(
        default_factory=lambda: NO_EXTRAS
    )  # what the hashes of blocks with images also cover
    # number of top tokens to return at each prompt position; None: no logprobs. Also in `sampling`;
    # a prefill may collect logprobs for its children, including that of their next token
    num_prompt_logprobs: int | None = None
    next_token_id: int | None = None

    state: SequenceState = SequenceState.WAITING
    # an element for each group of layers, or none
    block_tables: list[array[int]] = field(default_factory=list)
    # First held entry of each group's table: later tokens see no earlier ones.
    first_blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_committed_blocks: int = 0  # leading blocks that are in the prefix cache
    # the tokens that fit the blocks; no other sequence holds a block that this one writes
    num_writable_tokens: int = 0
    num_cached_tokens: int = 0  # cached at the first admission
    num_preemptions: int = 0
    in_flight: list[RowInFlight] = field(default_factory=list)  # rows of steps not applied yet
    is_aborted: bool = False  # or ended: the results of its steps in flight are dropped
    # Logprobs of the second to the last computed prompt token; None: not requested, or returned.
    prompt_logprobs: list[TokenLogprobs] | None = field(default=None, init=False)
    # Sum of the computed tokens, or their last.
    pooled: NDArray[np.float64] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.sampling is not None:
            self.num_prompt_logprobs = self.sampling.num_prompt_logprobs
        if self.num_prompt_logprobs is not None:
            self.prompt_logprobs = []
        # both grow, and the choices of one request may share the given lists
        self.token_ids = list(self.token_ids)
        self.block_hashes = list(self.block_hashes)

    def parent_hash_of(self, block_index: int) -> bytes:
        """Returns the parent of this block's hash; requires the hashes of all earlier blocks."""
        if block_index == 0:
            return self.cache_root
        parent = self.block_hashes[block_index - 1]
        if block_index == self.num_public_blocks:  # a tenant's blocks after it are not shared
            return root_after_public(self.cache_root, parent)
        return parent

    @property
    def placement_id(self) -> bytes:
        return self.sequence_id[:PLACEMENT_ID_BYTES]

    @property
    def origin(self) -> str | bytes:
        """The same for all tries of a request, which have placement ids of their own."""
        return self.request_id or self.placement_id

    @property
    def findable_hashes(self) -> list[bytes]:
        """Hashes of the blocks that may be shared with other sequences through the cache."""
        if self.is_zero_retention:
            return self.block_hashes[: self.num_public_blocks]
        return self.block_hashes

    @property
    def held_blocks(self) -> list[array[int]]:
        """[G] `block_tables` from the first held block on; earlier ids are stale or 0."""
        return [
            table[first:] for table, first in zip(self.block_tables, self.first_blocks, strict=True)
        ]

    @property
    def num_held_blocks(self) -> int:
        return sum(map(len, self.block_tables)) - sum(self.first_blocks)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens whose KV may come from the cache or from another worker.

        Every sequence but a prefill computes at least its last token.
        """
        if self.needs_every_token:
            return 0
        return len(self.token_ids) - (0 if self.is_prefill_only else 1)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_in_step(self) -> bool:
        return bool(self.in_flight)

    @property
    def next_position(self) -> int:
        """The position of the first token that no step computes or has computed."""
        position = self.num_computed_tokens
        for row in self.in_flight:  # in a third of the time of a generator
            position += row.num_scheduled_tokens
        return position

    @property
    def next_num_tokens(self) -> int:
        """The value of `num_tokens` once the steps in flight have sampled."""
        num_tokens = len(self.token_ids)
        for row in self.in_flight:
            num_tokens += row.samples
        return num_tokens

    @property
    def is_stalled(self) -> bool:
        """Whether no token can be sampled for it yet: it waits for its grammar."""
        return self.grammar is not None and self.grammar.is_stalled

    def num_ready(self, start: int, count: int) -> int:
        """Returns how many of `count` tokens from `start` on can be computed: those before the
        first image that is not encoded.
        """
        if self.images is None or count <= 0:
            return count
        return self.images.num_ready(self.num_computed_tokens, start, count)

    @property
    def error(self) -> HearthError | None:
        """The reason that it cannot continue; None: it can."""
        if self.grammar is not None and self.grammar.error is not None:
            return self.grammar.error
        return None if self.images is None else self.images.error

    @property
    def is_prefill_only(self) -> bool:
        return self.sampling is None and self.pooling is None

    @property
    def needs_every_token(self) -> bool:
        """Whether its result needs all prompt tokens computed, even cached ones."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    def transition_to(self, state: SequenceState) -> None:
        """Raises ValueError for a transition that is not in the diagram."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"invalid transition from {self.state.value} to {state.value}")
        self.state = state


def build_sequence(
    message: Request | RunPrefill | PinPrefix,
    token_ids: list[int],
    *,
    sequence_id: bytes,
    num_blocks: int | None = None,
    **fields: Any,
) -> Sequence:
    """Returns the sequence that computes `token_ids` for the tenant and cache root of a message.

    `num_blocks` is the number of full blocks of `token_ids`, if these are only part of the
    message's prompt. `fields` are other fields of `Sequence`; without `sampling` and `pooling`
    it is a prefill.
    """
    fields = {"num_prompt_tokens": len(token_ids), **fields}
    num_public_blocks = message.num_public_blocks
    fields["image_parts"] = message.images
    if num_blocks is not None:
        num_public_blocks = min(num_public_blocks, num_blocks)
    return Sequence(
        sequence_id=sequence_id,
        tenant_id=message.tenant_id,
        request_id="" if isinstance(message, PinPrefix) else message.request_id,
        is_zero_retention=not isinstance(message, PinPrefix) and message.is_zero_retention,
        cache_root=message.cache_root,
        token_ids=token_ids,
        block_hashes=unpack_hashes(message.block_hashes)[:num_blocks],
        num_public_blocks=num_public_blocks,
        region_class=message.region_class,
        **fields,
    )
