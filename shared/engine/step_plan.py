"""Encodes the changes of one step, as one message for every rank of a worker, and the answer to it.

A plan carries differences: a rank keeps the rows, their block tables and their last sampled tokens
(`executors/rank_state.py`), so a decode step costs some bytes for each row, whatever its context.
All ranks get the same bytes. Plans are numbered; they apply in order, without a gap.

Arrays of integers are packed: little-endian int32, or one byte for each flag.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.engine.step import StepOutput
from shared.messages import Pooling, SamplingParams

INT_BYTES = 4


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a row. Without `sampling` and `pooling` it is a prefill."""

    row: int
    sequence_id: bytes
    tables: tuple[bytes, ...]  # the row's blocks, by group of layers
    num_prompt_tokens: int
    choice_index: int = 0
    # Has neither grammar nor budget: masks come with each step
    sampling: SamplingParams | None = None
    pooling: Pooling | None = None
    stop_token_ids: tuple[int, ...] = ()
    has_grammar: bool = False
    history: bytes = b""  # all its tokens so far, only where penalties or bad words need them


class Grown(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a row's table of one group now has from `first_index` to its end."""

    row: int
    group: int
    first_index: int
    block_ids: bytes


class Fed(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a row computes, where they are not the one that it drew last."""

    row: int
    token_ids: bytes


class Successors(msgspec.Struct, frozen=True, array_like=True):
    """The prompt tokens after each of a row's first tokens, whose logprobs to return."""

    row: int
    token_ids: bytes
    num_top_logprobs: int


class PooledBefore(msgspec.Struct, frozen=True, array_like=True):
    """The sum over a row's tokens before its first one, where no step in flight computes them."""

    row: int
    sum: bytes  # FP64


class Embedded(msgspec.Struct, frozen=True, array_like=True):
    """Vectors of a row's image tokens."""

    row: int
    offsets: bytes  # of these tokens, after the first one that the row computes
    vectors: bytes  # [N, hidden_size] in the model's dtype


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step over S rows. `ended` applies first, then `new`, then `grown`."""

    step: int  # starts at 0
    rows: bytes  # [S] in batch order
    starts: bytes  # [S] position of the first token that the row computes
    num_tokens: bytes  # [S] that the row computes
    completes: bytes  # [S] flags: it computes the last token of its sequence, so it may sample
    ended: bytes = b""  # rows that are free from now on
    new: tuple[NewRow, ...] = ()
    grown: tuple[Grown, ...] = ()
    fed: tuple[Fed, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # (source, destination) blocks, before any write
    successors: tuple[Successors, ...] = ()
    pooled: tuple[PooledBefore, ...] = ()
    masked: bytes = b""  # rows that sample under a token mask; the masks follow in this order
    bans_stop: bytes = b""  # rows whose grammar bans the stop tokens without a mask
    embedded: tuple[Embedded, ...] = ()


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a step. With `failure`, sampling raised and the output is void; every rank goes
    on. `is_out_of_memory`: the device had too little for this step.
    """

    step: int
    output: StepOutput
    failure: str = ""
    is_out_of_memory: bool = False


def pack(numbers: Iterable[int]) -> bytes:
    """Packs integers. Raises OverflowError for one that is not an int32."""
    return array("i", numbers).tobytes()


def unpack(packed: bytes) -> NDArray[np.int64]:
    return np.frombuffer(packed, dtype=np.int32).astype(np.int64)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):  # `StepOutput.pooled`
        return value.tobytes()
    raise NotImplementedError(f"a step's message cannot hold {type(value)}")


def _array_of(kind: type, value: bytes) -> NDArray[np.float64]:
    return np.frombuffer(value, dtype=np.float64)


_encoder = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult, dec_hook=_array_of)


def encode(message: StepPlan | StepResult) -> bytes:
    return _encoder.encode(message)


def decode_plan(payload: bytes | memoryview) -> StepPlan:
    """Decodes a plan. Raises msgspec.DecodeError for bytes that are not a plan."""
    return _plan_decoder.decode(payload)


def decode_result(payload: bytes | memoryview) -> StepResult:
    """Decodes a result. Raises msgspec.DecodeError for bytes that are not a result."""
    return _result_decoder.decode(payload)
