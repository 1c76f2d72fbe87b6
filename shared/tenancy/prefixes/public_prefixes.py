"""The public prefixes of the models, and the block hashes of prompts that start with one.

The full blocks of a public prefix have hashes that all tenants share; the first block after them
mixes the tenant in (`shared/block_hash.py`). Prompts that start otherwise or with only a part of a
prefix, and prompts with a `cache_salt`, use the tenant's hashes only. A tenant's named prefix has
the hashes of the prompts that start with it: gateways and the index compute them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.block_hash import (
    NO_EXTRAS,
    BlockExtras,
    extend_chain,
    extend_packed,
    image_extras,
    public_root,
    root_after_public,
    root_hash,
)
from shared.messages import ModelCard
from shared.packing import TOKEN_ID_BYTES, pack_token_ids, unpack_token_ids
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix

_Key = tuple[str, str, int, bytes]  # model, revision, block size, key of the root


@dataclass(frozen=True, slots=True)
class PromptChain:
    """The hashes of a prompt's full blocks; the first `num_public` chain from `public_root`, and
    those after them from `cache_root`.
    """

    cache_root: bytes
    hashes: list[bytes]
    num_public: int = 0
    public_root: bytes | None = None


@dataclass(frozen=True, slots=True)
class _PublicChain:
    """The full blocks of one public prefix."""

    packed: bytes
    hashes: list[bytes]
    root: bytes


class PublicPrefixes:
    """`chain` may run on a thread during `replace`: it uses the old prefixes or the new ones."""

    def __init__(self, key: Callable[[], bytes] = bytes) -> None:
        """`key`: returns that of the root hashes now, see `block_hash.root_key`."""
        self._key = key
        self._prefixes: tuple[PinnedPrefix, ...] = ()
        self._chains: dict[_Key, list[_PublicChain]] = {}

    def replace(self, prefixes: Iterable[PinnedPrefix]) -> None:
        self._prefixes = tuple(prefixes)
        self._chains = {}

    def chain(
        self,
        root: bytes,
        token_ids: list[int],
        card: ModelCard,
        extras: BlockExtras = NO_EXTRAS,
        *,
        is_salted: bool = False,
    ) -> PromptChain:
        """Returns the hashes of a prompt. `root`: the tenant's root hash; `extras`: of its images.
        A prefix is not public for a prompt that has an image within it, nor for one that
        `is_salted`.
        """
        num_before_images = min(extras, default=len(token_ids))  # blocks
        if is_salted or not self._prefixes:
            return PromptChain(root, extend_chain(root, token_ids, card.block_size, extras))
        packed = pack_token_ids(token_ids)
        for public in self._public_chains(card):
            num_public = len(public.hashes)
            if num_public <= num_before_images and packed.startswith(public.packed):
                after = root_after_public(root, public.hashes[-1])
                rest = extend_chain(
                    after,
                    token_ids[num_public * card.block_size :],
                    card.block_size,
                    extras,
                    first_block=num_public,
                )
                return PromptChain(root, [*public.hashes, *rest], num_public, public.root)
        return PromptChain(root, extend_chain(root, token_ids, card.block_size, extras))

    def chain_of_prefix(self, prefix: PinnedPrefix, card: ModelCard) -> PromptChain:
        """Returns the hashes of a named prefix. All blocks of a public one are public, and its
        `cache_root` is its own.
        """
        extras = image_extras(prefix.parts, card.block_size)
        if prefix.is_public:
            root = public_root(prefix.name, card.revision, key=self._key())
            hashes = extend_packed(root, prefix.token_ids, card.block_size, extras)
            return PromptChain(root, hashes, len(hashes))
        root = root_hash(
            prefix.tenant_id, card.revision, cache_salt=prefix.cache_salt, key=self._key()
        )
        token_ids, is_salted = unpack_token_ids(prefix.token_ids), bool(prefix.cache_salt)
        return self.chain(root, token_ids, card, extras, is_salted=is_salted)

    def _public_chains(self, card: ModelCard) -> list[_PublicChain]:
        """Returns the chains of a model, the longest first, then by name."""
        root_key = self._key()
        chains, key = self._chains, (card.name, card.revision, card.block_size, root_key)
        if key not in chains:
            found = []
            for prefix in sorted(self._prefixes, key=lambda each: each.name):
                num_blocks = len(prefix.token_ids) // TOKEN_ID_BYTES // card.block_size
                if prefix.model == card.name and num_blocks:
                    packed = prefix.token_ids[: num_blocks * card.block_size * TOKEN_ID_BYTES]
                    root = public_root(prefix.name, card.revision, key=root_key)
                    hashes = extend_packed(root, packed, card.block_size)
                    found.append(_PublicChain(packed, hashes, root))
            chains[key] = sorted(found, key=lambda each: -len(each.packed))
        return chains[key]
