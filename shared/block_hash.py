"""The identity of a full KV block: a chained, tenant-salted BLAKE2b digest of 128 bits.

    root            = H("hearth-kv-v1", tenant_id, cache_salt, weights_digest, adapter)
    block_hash[i]   = H(block_hash[i-1] or root, token ids of block i)

An operator may publish a prefix for all tenants. Its blocks chain from a separate kind of root, and
the first block after them also hashes the tenant's root, so only the public blocks are shared.

    public root     = H("hearth-kv-public-v1", name, weights_digest, adapter)
    after it        = H("hearth-kv-after-v1", tenant's root, last public block_hash)

Two blocks share a hash only if tenant, salt, weights, adapter and *every token up to their end*
are equal, so a cross-tenant hit is impossible by construction in every tier keyed by the hash.
With 128 bits no comparison of the tokens is needed (birthday bound 2^64 blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, pack_token_ids

PUBLIC_TENANT_ID = ""  # owner of the blocks of public prefixes; no tenant has this name


def root_hash(
    tenant_id: str, weights_digest: str, *, cache_salt: str = "", adapter: str = ""
) -> bytes:
    """The root of a tenant's hash chains. Fields are length-prefixed, so no two inputs collide."""
    return _digest(b"hearth-kv-v1", tenant_id, cache_salt, weights_digest, adapter)


def public_root(name: str, weights_digest: str, *, adapter: str = "") -> bytes:
    """The root of a public prefix's hash chain; no tenant name and salt can produce it."""
    return _digest(b"hearth-kv-public-v1", name, weights_digest, adapter)


def root_after_public(tenant_root: bytes, last_public_hash: bytes) -> bytes:
    """The parent hash of a tenant's first block after a public prefix."""
    return blake2b(
        b"hearth-kv-after-v1" + tenant_root + last_public_hash, digest_size=BLOCK_HASH_BYTES
    ).digest()


def _digest(domain: bytes, *fields: str) -> bytes:
    digest = blake2b(domain, digest_size=BLOCK_HASH_BYTES)
    for field in fields:
        encoded = field.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def extend_chain(parent_hash: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, chained from `parent_hash`.

    Tokens of an incomplete last block are ignored.
    """
    packed = memoryview(pack_token_ids(token_ids))
    step = block_size * TOKEN_ID_BYTES
    hashes = []
    for start in range(0, len(packed) - step + 1, step):
        parent_hash = blake2b(
            packed[start : start + step], key=parent_hash, digest_size=BLOCK_HASH_BYTES
        ).digest()
        hashes.append(parent_hash)
    return hashes
