"""Checks and decodes the embeddings that workers send as bytes."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable

from shared.errors import HearthError

FLOAT_BYTES = 4


def check_embeddings(received: Iterable[bytes | None]) -> list[bytes]:
    """Returns the embeddings. Raises HearthError if one is missing or truncated."""
    checked = []
    for each in received:
        if not each or len(each) % FLOAT_BYTES:
            raise HearthError("the worker sent no embedding")
        checked.append(each)
    return checked


def unpack_vector(packed: bytes, *, is_normalized: bool) -> array[float]:
    """Returns the vector in `packed`, little-endian FP32, and scales it to length one if
    `is_normalized`.
    """
    vector = little_endian(array("f", packed))
    return normalized(vector) if is_normalized else vector


def normalized(vector: array[float]) -> array[float]:
    """Returns the vector scaled to length one, or a zero vector unchanged."""
    length = math.hypot(*vector)
    return array("f", [value / length for value in vector]) if length else vector


def little_endian(vector: array[float]) -> array[float]:
    """Converts the vector in place to or from little-endian byte order, and returns it."""
    if sys.byteorder == "big":
        vector.byteswap()
    return vector
