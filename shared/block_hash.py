"""The identity of a full KV block: a chained, tenant-salted BLAKE2b digest of 128 bits.

    root            = H(key; "hearth-kv-v1", tenant_id, cache_salt, weights_digest, adapter)
    block_hash[i]   = H(block_hash[i-1] or root, token ids of block i)

The key comes from the cluster secret, which gateways and the index hold and workers do not: a
worker learns the root of a tenant with the tenant's first request, and can compute no other.
Workers compute the chain of each request again: a block's hash in a cache is that of its tokens.

An operator may publish a prefix for all tenants. Its blocks chain from a separate kind of root, and
the first block after them also hashes the tenant's root, so only the public blocks are shared.

    public root     = H(key; "hearth-kv-public-v1", name, weights_digest, adapter)
    after it        = H("hearth-kv-after-v1", tenant's root, last public block_hash)

Two blocks share a hash only if tenant, salt, weights, adapter and *every token up to their end*
are equal, so a cross-tenant hit is impossible by construction in every tier keyed by the hash.
With 128 bits no comparison of the tokens is needed (birthday bound 2^64 blocks).

The tokens of an image are all one id, so a block that holds some of them also hashes the image:

    image block     = H'(block_hash[i-1], token ids, for each image in the block:
                         image_hash, position of its first token here in the image and in the block,
                         number of its tokens here)

H' has a domain of its own. So two blocks share a hash only if their pixels are equal, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from struct import Struct, iter_unpack

from shared.messages import ImagePart
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, pack_token_ids

_BLOCK_STATE = blake2b(digest_size=BLOCK_HASH_BYTES, person=b"hearth-kv-block")
_IMAGE_STATE = blake2b(digest_size=BLOCK_HASH_BYTES, person=b"hearth-kv-image")
_IMAGE_EXTENT = Struct("<16sIII")
# What the hashes of blocks with images also cover, by index of the block.
BlockExtras = Mapping[int, bytes]
NO_EXTRAS: BlockExtras = {}
PUBLIC_TENANT_ID = ""  # owner of the blocks of public prefixes; no tenant has this name


def root_key(cluster_secret: str) -> bytes:
    """Returns the key of all roots; without a secret it is empty, and any process can
    compute any root.
    """
    if not cluster_secret:
        return b""
    return blake2b(cluster_secret.encode(), digest_size=32, person=b"hearth-kv-root").digest()


def root_hash(
    tenant_id: str,
    weights_digest: str,
    *,
    cache_salt: str = "",
    adapter: str = "",
    key: bytes = b"",
) -> bytes:
    """Returns the root of a tenant's hash chains. Fields are length-prefixed, so no two
    inputs collide.
    """
    return _digest(key, b"hearth-kv-v1", tenant_id, cache_salt, weights_digest, adapter)


def public_root(name: str, weights_digest: str, *, adapter: str = "", key: bytes = b"") -> bytes:
    """Returns the root of a public prefix's hash chain; no tenant name and salt can produce it."""
    return _digest(key, b"hearth-kv-public-v1", name, weights_digest, adapter)


def root_after_public(tenant_root: bytes, last_public_hash: bytes) -> bytes:
    """Returns the parent hash of a tenant's first block after a public prefix."""
    return blake2b(
        b"hearth-kv-after-v1" + tenant_root + last_public_hash, digest_size=BLOCK_HASH_BYTES
    ).digest()


def _digest(key: bytes, domain: bytes, *fields: str) -> bytes:
    digest = blake2b(domain, key=key, digest_size=BLOCK_HASH_BYTES)
    for field in fields:
        encoded = field.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def image_extras(images: Sequence[ImagePart], block_size: int) -> dict[int, bytes]:
    """Returns what the hashes of blocks with image tokens also cover, by index of the block in the
    prompt.
    """
    extras: dict[int, bytes] = {}
    for image in images:
        end = image.first_token + image.num_tokens
        for index in range(image.first_token // block_size, -(-end // block_size)):
            begin = index * block_size
            first, last = max(begin, image.first_token), min(begin + block_size, end)
            extent = _IMAGE_EXTENT.pack(
                image.image_hash, first - image.first_token, first - begin, last - first
            )
            extras[index] = extras.get(index, b"") + extent
    return extras


def extend_chain(
    parent_hash: bytes,
    token_ids: Sequence[int],
    block_size: int,
    extras: BlockExtras = NO_EXTRAS,
    *,
    first_block: int = 0,
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, chained from `parent_hash`.

    Tokens of an incomplete last block are ignored. `first_block` is the index that the first of
    these blocks has in `extras`.
    """
    packed = pack_token_ids(token_ids)
    return extend_packed(parent_hash, packed, block_size, extras, first_block=first_block)


def extend_packed(
    parent_hash: bytes,
    packed_token_ids: bytes,
    block_size: int,
    extras: BlockExtras = NO_EXTRAS,
    *,
    first_block: int = 0,
) -> list[bytes]:
    """Hashes packed token ids like `extend_chain`.

    128k tokens in blocks of 16 take 2.7 ms: copying a prepared state takes half the time of a new
    one, and a key would take a second compression.
    """
    step = block_size * TOKEN_ID_BYTES
    num_bytes = len(packed_token_ids) // step * step
    if extras:
        blocks = iter_unpack(f"{step}s", memoryview(packed_token_ids)[:num_bytes])
        return _extend_with_images(parent_hash, [block for (block,) in blocks], extras, first_block)
    new_state, hashes = _BLOCK_STATE.copy, []
    for (block,) in iter_unpack(f"{step}s", memoryview(packed_token_ids)[:num_bytes]):
        state = new_state()
        state.update(parent_hash + block)
        parent_hash = state.digest()
        hashes.append(parent_hash)
    return hashes


def _extend_with_images(
    parent_hash: bytes, blocks: Sequence[bytes], extras: BlockExtras, first_block: int
) -> list[bytes]:
    hashes = []
    for index, block in enumerate(blocks, first_block):
        extra = extras.get(index)
        state = (_BLOCK_STATE if extra is None else _IMAGE_STATE).copy()
        state.update(parent_hash + block + (extra or b""))
        parent_hash = state.digest()
        hashes.append(parent_hash)
    return hashes


def prompt_chain(
    packed_token_ids: bytes,
    block_size: int,
    *,
    cache_root: bytes,
    public_root: bytes | None,
    num_public_blocks: int,
    extras: BlockExtras = NO_EXTRAS,
) -> list[bytes]:
    """Hashes of a prompt's full blocks, the first `num_public_blocks` of them public."""
    if public_root is None or not num_public_blocks:
        return extend_packed(cache_root, packed_token_ids, block_size, extras)
    num_bytes = num_public_blocks * block_size * TOKEN_ID_BYTES
    public = extend_packed(public_root, packed_token_ids[:num_bytes], block_size, extras)
    after = root_after_public(cache_root, public[-1]) if public else cache_root
    rest = packed_token_ids[num_bytes:]
    return public + extend_packed(after, rest, block_size, extras, first_block=num_public_blocks)
