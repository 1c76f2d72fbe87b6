"""Steps and their results as bytes: the leader encodes a step once, and every rank decodes it.

msgpack, never pickle. A token mask is computed in the leader's process, so a step carries its place
among the step's masks; the rank that samples asks the leader for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from shared.clock import Clock
from shared.engine.runner import StepInputs, StepOutput, TokenMask, TokenMasks

MaskOf = Callable[[int], TokenMask]
DTYPES = {np.dtype(each) for each in (np.int32, np.int64, np.uint64, np.float32, np.float64)}


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode_step(inputs: StepInputs) -> bytes:
    masks = inputs.sampling.masks
    places = {} if masks is None else {id(mask): i for i, mask in enumerate(masks.masks)}

    def encode(value: Any) -> Any:
        return places[id(value)] if id(value) in places else _encode(value)

    return msgspec.msgpack.encode(inputs, enc_hook=encode)


def decode_step(data: bytes, mask_of: MaskOf) -> StepInputs:
    """`mask_of`: the mask at a place. Raises msgspec.DecodeError for anything but a step."""

    def decode(kind: Any, value: Any) -> Any:
        if kind is not TokenMask:
            return _decode(kind, value)
        if not isinstance(value, int):
            raise ValueError("a mask is not a place")
        return mask_of(value)

    return _decoded(data, StepInputs, decode)


def encode_output(output: StepOutput) -> bytes:
    return msgspec.msgpack.encode(output, enc_hook=_encode)


def decode_output(data: bytes) -> StepOutput:
    """Raises msgspec.DecodeError for anything but an output."""
    return _decoded(data, StepOutput, _decode)


def mask_words(masks: TokenMasks | None, timeout_s: float, clock: Clock) -> list[bytes | None]:
    """The words of all masks of a step; None for those not ready within `timeout_s` together."""
    if masks is None:
        return []
    deadline = clock.now() + timeout_s
    words = [mask.wait(max(0.0, deadline - clock.now())) for mask in masks.masks]
    return [None if each is None else each.tobytes() for each in words]


def _decoded(data: bytes, kind: Any, hook: Callable[[Any, Any], Any]) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=hook)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, msgspec.DecodeError):
            raise
        raise msgspec.DecodeError(str(error)) from error


def _encode(value: Any) -> Any:
    match value:
        case np.ndarray():
            return _Array(value.dtype.str, value.shape, value.tobytes())
        case np.integer() | np.floating():
            return value.item()
    raise NotImplementedError(f"a step holds no {type(value).__name__}")


def _decode(kind: Any, value: Any) -> Any:
    array = msgspec.convert(value, _Array)
    dtype = np.dtype(array.dtype)
    if dtype not in DTYPES:
        raise ValueError(f"arrays of {dtype} are not part of a step")
    # torch needs memory that it may write
    return np.frombuffer(bytearray(array.data), dtype).reshape(array.shape)
