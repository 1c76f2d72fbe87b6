"""Token ids and block hashes as packed bytes, which messages carry instead of lists."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from shared.errors import InvalidRequest

TOKEN_ID_BYTES = 4
BLOCK_HASH_BYTES = 16


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Returns the token ids as little-endian u32. Raises InvalidRequest for an id outside u32."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids must be integers in [0, 2**32): {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Unpacks token ids. Raises InvalidRequest if the length is not a multiple of 4 bytes."""
    if len(packed) % TOKEN_ID_BYTES:
        raise InvalidRequest(f"packed token ids have {len(packed)} bytes, not a multiple of 4")
    token_ids = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> list[bytes]:
    """Unpacks block hashes. Raises InvalidRequest if the length is not a multiple of 16
    bytes (128 bits).
    """
    if len(packed) % BLOCK_HASH_BYTES:
        raise InvalidRequest(f"packed hashes have {len(packed)} bytes, not a multiple of 16")
    step = BLOCK_HASH_BYTES
    return [packed[start : start + step] for start in range(0, len(packed), step)]
