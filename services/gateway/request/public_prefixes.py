"""The public prefixes of this gateway's model, and the block hashes of prompts that start with one.

The full blocks of a public prefix have hashes that all tenants share; the first block after them
mixes the tenant in (`shared/block_hash.py`). Prompts that start otherwise or with only a part of a
prefix, and prompts with a `cache_salt`, use the tenant's hashes only.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.block_hash import extend_chain, public_root, root_after_public
from shared.messages import ModelCard
from shared.packing import TOKEN_ID_BYTES, pack_token_ids, unpack_token_ids
from shared.tenancy.pinned_prefix import PinnedPrefix

_Key = tuple[str, int]  # revision and block size


class PublicPrefixes:
    """`chain` may run on a thread during `replace`: it uses the old prefixes or the new ones."""

    def __init__(self) -> None:
        self._prefixes: tuple[PinnedPrefix, ...] = ()
        self._chains: dict[_Key, list[tuple[bytes, list[bytes]]]] = {}

    def replace(self, prefixes: Iterable[PinnedPrefix]) -> None:
        self._prefixes = tuple(prefixes)
        self._chains = {}

    def chain(self, root: bytes, token_ids: list[int], card: ModelCard) -> tuple[list[bytes], int]:
        """Returns the full blocks' hashes and the number of public ones. `root`: the tenant's."""
        if not self._prefixes:
            return extend_chain(root, token_ids, card.block_size), 0
        packed = pack_token_ids(token_ids)
        for prefix, hashes in self._public_chains(card):
            if packed.startswith(prefix):
                after = root_after_public(root, hashes[-1])
                rest = token_ids[len(hashes) * card.block_size :]
                return [*hashes, *extend_chain(after, rest, card.block_size)], len(hashes)
        return extend_chain(root, token_ids, card.block_size), 0

    def _public_chains(self, card: ModelCard) -> list[tuple[bytes, list[bytes]]]:
        """Returns (packed tokens, hashes) of the full blocks, longest first, then by name."""
        chains, key = self._chains, (card.revision, card.block_size)
        if key not in chains:
            found = []
            for prefix in sorted(self._prefixes, key=lambda each: each.name):
                num_blocks = len(prefix.token_ids) // TOKEN_ID_BYTES // card.block_size
                if prefix.model == card.name and num_blocks:
                    packed = prefix.token_ids[: num_blocks * card.block_size * TOKEN_ID_BYTES]
                    root = public_root(prefix.name, card.revision)
                    token_ids = unpack_token_ids(packed)
                    found.append((packed, extend_chain(root, token_ids, card.block_size)))
            chains[key] = sorted(found, key=lambda each: -len(each[0]))
        return chains[key]
