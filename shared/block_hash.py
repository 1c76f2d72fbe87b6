"""The identity of a full KV block: a chained, tenant-salted BLAKE2b digest of 128 bits.

    root            = H("hearth-kv-v1", tenant_id, cache_salt, weights_digest, adapter)
    block_hash[i]   = H(block_hash[i-1] or root, token ids of block i)

Two blocks share a hash only if tenant, salt, weights, adapter and *every token up to their end*
are equal, so a cross-tenant hit is impossible by construction in every tier that is keyed by it.
A digest of 128 bits needs no comparison of the tokens behind it (birthday bound 2^64 blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, pack_token_ids


def root_hash(
    tenant_id: str, weights_digest: str, *, cache_salt: str = "", adapter: str = ""
) -> bytes:
    """Where a tenant's chains start; length-prefixed fields cannot imitate each other."""
    digest = blake2b(b"hearth-kv-v1", digest_size=BLOCK_HASH_BYTES)
    for field in (tenant_id, cache_salt, weights_digest, adapter):
        encoded = field.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def extend_chain(parent_hash: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, which follow `parent_hash`; the rest is ignored."""
    packed = memoryview(pack_token_ids(token_ids))
    step = block_size * TOKEN_ID_BYTES
    hashes = []
    for start in range(0, len(packed) - step + 1, step):
        parent_hash = blake2b(
            packed[start : start + step], key=parent_hash, digest_size=BLOCK_HASH_BYTES
        ).digest()
        hashes.append(parent_hash)
    return hashes
