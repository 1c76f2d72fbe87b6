"""What two sites call a prefix of a request that one has sent to the other. Pure functions.

A prefix is named every DIGEST_TOKENS tokens by a fingerprint: the first 32 bits of the hash of its
last block, as the site that sent the request knows it, xor those of its cache root. The root is
part of it because blocks of a public prefix have one hash for all tenants of their site, but
another site holds them for each tenant.

A wrong fingerprint costs time only: the site that serves the request matches complete hashes.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages import FINGERPRINT_BYTES
from shared.packing import BLOCK_HASH_BYTES, pack_token_ids, unpack_token_ids

DIGEST_TOKENS = 128  # half a byte for a block of 16 tokens; finer ones save less than they cost


class PrefixFingerprints:
    """The fingerprints of one prompt, from its shortest prefix to its longest: one for every
    `blocks_each` blocks. Each is read from the packed hashes when it is used.
    """

    __slots__ = ("_first", "_hashes", "_root", "_step", "blocks_each")

    def __init__(self, cache_root: bytes, block_hashes: bytes, block_size: int) -> None:
        self.blocks_each = max(1, DIGEST_TOKENS // block_size)
        self._step = self.blocks_each * BLOCK_HASH_BYTES
        self._first = self._step - BLOCK_HASH_BYTES
        self._hashes = block_hashes
        self._root = int.from_bytes(cache_root[:FINGERPRINT_BYTES], "little")

    def __len__(self) -> int:
        return len(self._hashes) // self._step

    def at(self, index: int) -> int:
        """Returns the fingerprint of the first `(index + 1) * blocks_each` blocks."""
        start = self._first + index * self._step
        word = self._hashes[start : start + FINGERPRINT_BYTES]
        return int.from_bytes(word, "little") ^ self._root


def pack_fingerprints(fingerprints: Iterable[int]) -> bytes:
    return pack_token_ids(fingerprints)  # these are 32 bits, too


def unpack_fingerprints(packed: bytes) -> list[int]:
    """Unpacks fingerprints of a peer; ignores an incomplete last one."""
    return unpack_token_ids(packed[: len(packed) // FINGERPRINT_BYTES * FINGERPRINT_BYTES])
