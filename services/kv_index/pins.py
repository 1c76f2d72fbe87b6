"""The pinned prefixes, and the command that a worker receives for each. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from msgspec import structs

from shared.messages import ModelCard, PinPrefix
from shared.packing import TOKEN_ID_BYTES, pack_hashes
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix, request_of_prefix
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes

PIN_LEASE_S = 15.0


@dataclass(frozen=True, slots=True)
class ExpectedPin:
    """A prefix as workers of one model hold it."""

    prefix: PinnedPrefix
    tip_hash: bytes
    num_tokens: int  # tokens of full blocks
    command: PinPrefix


class Pins:
    def __init__(self, root_key: Callable[[], bytes] = bytes) -> None:
        """`root_key`: returns that of now, see `block_hash.root_key`."""
        self._root_key = root_key
        self._public = PublicPrefixes(root_key)
        self._prefixes: dict[str, PinnedPrefix] = {}  # key: digest
        self._regions: dict[str, Collection[str] | None] = {}  # regions of each tenant's record now
        self._classes: dict[str, str] = {}  # region class of each tenant's record now
        self._expected: dict[tuple[str, str, int, bytes], ExpectedPin | None] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def has(self, digest: str) -> bool:
        return digest in self._prefixes

    def add(self, digest: str, prefix: PinnedPrefix) -> None:
        """Adds a prefix, of whose images the files are not retained."""
        images = [structs.replace(each, content=b"") for each in prefix.images]
        self._prefixes[digest] = structs.replace(prefix, images=images)
        if prefix.is_public:
            self._replace_public()

    def allow(
        self, tenant_id: str, regions: Collection[str] | None, region_class: str = ""
    ) -> None:
        """The regions whose workers may hold the tenant's prefixes, None: all; and the region class
        of the messages with them.
        """
        self._regions[tenant_id] = regions
        self._classes[tenant_id] = region_class

    def forget(self, tenant_id: str) -> None:
        self._regions.pop(tenant_id, None)
        self._classes.pop(tenant_id, None)

    def class_of(self, pin: ExpectedPin) -> str:
        """Returns the region class of a pin's tenant."""
        return self._classes.get(pin.prefix.tenant_id, "")

    def allows(self, tenant_id: str, region: str) -> bool:
        """Returns whether a region may hold the tenant's prefixes."""
        regions = self._regions.get(tenant_id)
        return regions is None or region in regions

    def command(self, pin: ExpectedPin, gateway_id: str = "") -> PinPrefix:
        """Returns the command for a pin, with the regions and the class of its tenant now.
        `gateway_id`: which reads its images; empty for one without.
        """
        regions = self._regions.get(pin.prefix.tenant_id) or ()
        return structs.replace(
            pin.command,
            allowed_regions=tuple(sorted(regions)),
            region_class=self.class_of(pin),
            gateway_id=gateway_id,
        )

    def retain_only(self, digests: Collection[str]) -> None:
        gone = [self._prefixes.pop(each) for each in self._prefixes.keys() - digests]
        self._expected = {key: pin for key, pin in self._expected.items() if key[0] in digests}
        if any(each.is_public for each in gone):
            self._replace_public()

    def _replace_public(self) -> None:
        """Uses the public prefixes of now, with which any tenant's prefix may start."""
        self._public.replace(each for each in self._prefixes.values() if each.is_public)
        self._expected.clear()

    def retain_cards(self, cards: Iterable[ModelCard]) -> None:
        """Forgets what was expected of workers with other cards, or with an earlier root key."""
        root_key = self._root_key()
        kinds = {(each.revision, each.block_size, root_key) for each in cards}
        for key in [each for each in self._expected if each[1:] not in kinds]:
            del self._expected[key]

    def expected(self, cards: Iterable[ModelCard]) -> dict[bytes, ExpectedPin]:
        """Returns all pins for workers with any of these cards, by the hash of the last block."""
        found = {}
        for card in cards:
            for digest, prefix in self._prefixes.items():
                pin = self._pin(digest, prefix, card)
                if pin is not None:
                    found[pin.tip_hash] = pin
        return found

    def expected_of(self, card: ModelCard, region: str) -> dict[bytes, ExpectedPin]:
        """Returns the pins for a worker with this card, in this region, by the hash of
        the last block.
        """
        return {
            tip_hash: pin
            for tip_hash, pin in self.expected([card]).items()
            if self.allows(pin.prefix.tenant_id, region)
        }

    def _pin(self, digest: str, prefix: PinnedPrefix, card: ModelCard) -> ExpectedPin | None:
        if prefix.model != card.name:
            return None
        key = (digest, card.revision, card.block_size, self._root_key())
        if key not in self._expected:
            self._expected[key] = expected_pin(prefix, card, self._public)
        pin = self._expected[key]
        return pin if pin is not None and pin.num_tokens < card.max_context_tokens else None


def expected_pin(
    prefix: PinnedPrefix, card: ModelCard, public: PublicPrefixes
) -> ExpectedPin | None:
    """Returns None before a gateway has tokenized the prefix, for images of another revision, for
    less than one block, and for a tenant's prefix that has no block after those of a public one,
    which are pinned for all. Whether it fits the context is each worker's own.
    """
    num_blocks = len(prefix.token_ids) // TOKEN_ID_BYTES // card.block_size
    num_tokens = num_blocks * card.block_size
    if not num_tokens or not prefix.is_of(card.revision):
        return None
    chain = public.chain_of_prefix(prefix, card)
    if chain.num_public == num_blocks and not prefix.is_public:
        return None
    images = tuple(each for each in prefix.parts if each.first_token < num_tokens)
    command = PinPrefix(
        tenant_id=prefix.tenant_id,
        model=card.name,
        revision=card.revision,
        cache_root=chain.cache_root,
        public_root=chain.public_root,
        token_ids=prefix.token_ids[: num_tokens * TOKEN_ID_BYTES],
        block_hashes=pack_hashes(chain.hashes),
        num_public_blocks=chain.num_public,
        lease_s=PIN_LEASE_S,
        images=images,
        request_id=request_of_prefix(prefix.name) if images else "",
    )
    return ExpectedPin(prefix, chain.hashes[-1], num_tokens, command)
