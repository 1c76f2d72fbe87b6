"""The prefixes of other sites' requests that this site holds, as far as this gateway knows. No I/O.

    computed here ──due──▶ checked with the index ──due, in turn──▶ checked …
         ▲                        └── MAX_MISSES times nothing held, or too many: forgotten
         └── the same prompt again, or a longer one, which replaces it

Only the index knows what the caches of this site hold, and evict. A prefix is known by the site
that sent its request, and reported to that site alone, apart from those of other region classes.
What is withdrawn is forgotten at once, and no message names it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.sites.site_digest import SiteDigest
from shared.messages import Request
from shared.packing import BLOCK_HASH_BYTES
from shared.sites.prefix_fingerprints import PrefixFingerprints
from shared.subjects import site_in

MAX_BLOCKS = 2**20  # of all sites together, in equal shares of those with prefixes here
MIN_SHARES = 16
MAX_MISSES = 3  # the events of a new prefix may reach the index later
CHECKED_PER_S = 128  # prefixes,
CHECKED_BLOCKS_PER_S = 32_768  # and their blocks: half a megabyte of hashes


@dataclass(eq=False, slots=True)
class HeldPrefix:
    """The blocks of one prompt: `block_hashes` are this site's, `fingerprints` the other site's."""

    site: str
    tenant_id: str
    region_class: str
    model: str
    revision: str
    block_hashes: bytes
    fingerprints: tuple[int, ...]
    blocks_each: int  # of a fingerprint
    num_held: int = 0  # fingerprints whose blocks this site holds
    num_misses: int = 0  # checks in a row that found nothing
    is_forgotten: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.block_hashes) // BLOCK_HASH_BYTES

    @property
    def tip(self) -> bytes:
        return self.block_hashes[-BLOCK_HASH_BYTES:]

    @property
    def held(self) -> tuple[int, ...]:
        return self.fingerprints[: self.num_held]


class _OfSite:
    """The prefixes of one site by their last block, the least recently used one first."""

    def __init__(self) -> None:
        self.by_tip: OrderedDict[bytes, HeldPrefix] = OrderedDict()
        self.num_blocks = 0


class HeldPrefixes:
    def __init__(self) -> None:
        self._sites: dict[str, _OfSite] = {}
        # By site and region class. Never forgotten: they number what was sent
        self._digests: dict[tuple[str, str], SiteDigest] = {}
        self._new: OrderedDict[HeldPrefix, None] = OrderedDict()  # not found yet
        self._turns: OrderedDict[HeldPrefix, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return sum(each.num_blocks for each in self._sites.values())

    def digests(self) -> tuple[tuple[tuple[str, str], SiteDigest], ...]:
        """Returns the sites and region classes with what is still to be sent of each."""
        return tuple(self._digests.items())

    def digests_of(self, site: str) -> list[SiteDigest]:
        return [each for (name, _), each in self._digests.items() if name == site]

    def computed(self, asked: Request, here: Request) -> None:
        """Records that a worker has computed the prompt of `asked`, which is `here` at this site.
        A request of zero retention leaves nothing.
        """
        prefix = _prefix_of(asked, here)
        if prefix is None or here.is_zero_retention:
            return
        self._digest(prefix).earn(len(asked.prompt_token_ids))
        known = self._known(prefix)
        if known is not None and known.region_class == prefix.region_class:
            self._sites[prefix.site].by_tip.move_to_end(prefix.tip)
            return
        if known is not None:  # its tenant has another class since
            self._forget(known)
        site = self._sites.setdefault(prefix.site, _OfSite())
        site.by_tip[prefix.tip] = prefix
        site.num_blocks += prefix.num_blocks
        self._new[prefix] = None
        self._inherit(site, prefix)
        self._limit(site)

    def due(self) -> list[HeldPrefix]:
        """Returns the prefixes to check in one second: new ones first, then the others in turn.
        Each must be given to `checked`.
        """
        due: list[HeldPrefix] = []
        num_blocks = 0
        for queue in (self._new, self._turns):
            while queue and len(due) < CHECKED_PER_S and num_blocks < CHECKED_BLOCKS_PER_S:
                prefix, _ = queue.popitem(last=False)
                due.append(prefix)
                num_blocks += prefix.num_blocks
        return due

    def checked(self, prefix: HeldPrefix, num_blocks: int | None) -> None:
        """Takes in how many leading blocks of a prefix this site holds; None if the index does not
        know.
        """
        if prefix.is_forgotten:
            return
        if num_blocks is None:
            self._turns[prefix] = None
            return
        num_held = min(num_blocks // prefix.blocks_each, len(prefix.fingerprints))
        self._set_held(prefix, num_held)
        prefix.num_misses = 0 if num_held else prefix.num_misses + 1
        if prefix.num_misses >= MAX_MISSES:
            self._forget(prefix)
        else:
            (self._turns if num_held else self._new)[prefix] = None

    def withdraw_tenant(self, tenant_id: str) -> None:
        """Forgets the prefixes that are held under the name of a tenant `{site}/{tenant}`."""
        self._withdraw(site_in(tenant_id) or "", lambda each: each.tenant_id == tenant_id)

    def withdraw_classes(self, site: str) -> None:
        """Forgets the prefixes of all region classes of a site."""
        self._withdraw(site, lambda each: bool(each.region_class))

    def _withdraw(self, site: str, is_meant: Callable[[HeldPrefix], bool]) -> None:
        held = self._sites.get(site, _OfSite()).by_tip.values()
        withdrawn = list(filter(is_meant, held))
        for (name, region_class), digest in self._digests.items():
            if name == site:
                of_class = (each for each in withdrawn if each.region_class == region_class)
                digest.withdraw(each for prefix in of_class for each in prefix.held)
        for each in withdrawn:
            each.num_held = 0
            self._forget(each)

    def _known(self, prefix: HeldPrefix) -> HeldPrefix | None:
        site = self._sites.get(prefix.site)
        return None if site is None else site.by_tip.get(prefix.tip)

    def _digest(self, prefix: HeldPrefix) -> SiteDigest:
        key = prefix.site, prefix.region_class
        if key not in self._digests:
            self._digests[key] = SiteDigest(prefix.region_class)
        return self._digests[key]

    def _inherit(self, site: _OfSite, longer: HeldPrefix) -> None:
        """Replaces the prefixes that `longer` continues: those of earlier turns of a chat."""
        step = longer.blocks_each * BLOCK_HASH_BYTES
        for end in range(step, len(longer.block_hashes), step):
            shorter = site.by_tip.get(longer.block_hashes[end - BLOCK_HASH_BYTES : end])
            if shorter is None:
                continue
            if shorter.region_class == longer.region_class:
                self._set_held(longer, max(longer.num_held, shorter.num_held))
            self._forget(shorter)

    def _limit(self, site: _OfSite) -> None:
        share = MAX_BLOCKS // max(len(self._sites), MIN_SHARES)
        while site.num_blocks > share:
            self._forget(next(iter(site.by_tip.values())))

    def _forget(self, prefix: HeldPrefix) -> None:
        site = self._sites[prefix.site]
        self._set_held(prefix, 0)
        prefix.is_forgotten = True
        self._new.pop(prefix, None)
        self._turns.pop(prefix, None)
        del site.by_tip[prefix.tip]
        site.num_blocks -= prefix.num_blocks
        if not site.by_tip:
            self._sites.pop(prefix.site, None)

    def _set_held(self, prefix: HeldPrefix, num_held: int) -> None:
        digest, before = self._digest(prefix), prefix.num_held
        prefix.num_held = num_held
        digest.hold(prefix.fingerprints[before:num_held])
        digest.release(prefix.fingerprints[num_held:before])


def _prefix_of(asked: Request, here: Request) -> HeldPrefix | None:
    """Returns the prompt without its last blocks that no fingerprint names; None if it is short."""
    theirs = PrefixFingerprints(asked.cache_root, asked.block_hashes, asked.block_size)
    ours = PrefixFingerprints(here.cache_root, here.block_hashes, here.block_size)
    num = min(len(theirs), len(ours))
    if not num:
        return None
    return HeldPrefix(
        site=here.origin_site,
        tenant_id=here.tenant_id,
        region_class=here.region_class,
        model=here.model,
        revision=here.revision,
        block_hashes=here.block_hashes[: num * ours.blocks_each * BLOCK_HASH_BYTES],
        fingerprints=tuple(map(theirs.at, range(num))),
        blocks_each=ours.blocks_each,
    )
