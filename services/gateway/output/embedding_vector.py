"""Embeddings, from the bytes that a worker sent."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable

from shared.errors import HearthError

FLOAT_BYTES = 4


def check_embeddings(received: Iterable[bytes | None]) -> list[bytes]:
    """Raises HearthError for a missing or truncated one."""
    checked = []
    for each in received:
        if not each or len(each) % FLOAT_BYTES:
            raise HearthError("the worker sent no embedding")
        checked.append(each)
    return checked


def unpack_vector(packed: bytes, *, is_normalized: bool) -> array[float]:
    """`packed`: little-endian FP32."""
    vector = little_endian(array("f", packed))
    return normalized(vector) if is_normalized else vector


def normalized(vector: array[float]) -> array[float]:
    """Scales the vector to length one; returns a zero vector unchanged."""
    length = math.hypot(*vector)
    return array("f", [value / length for value in vector]) if length else vector


def little_endian(vector: array[float]) -> array[float]:
    """Converts to or from the wire's byte order."""
    if sys.byteorder == "big":
        vector.byteswap()
    return vector
