"""Which sites hold how much of a prompt, by the digests that their gateways send. No I/O.

    gateway of a site: unknown ──is_first──▶ in step ──the next number──▶ in step
                          ▲                     └── gap, flood, silence, lost ──┐
                          └────────────── its fingerprints are dropped ◀───────┘

A dictionary for each region class maps a fingerprint to a bit mask of the gateways that report it.
A gateway numbers the digests of each class by themselves. A prompt is looked up in its own class
alone. A digest may be wrong, or a peer may invent one: it costs time, never correctness, as the
site matches complete hashes. A peer gets a share of the memory, and of the time to take its digests
in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.allowance import Allowance
from shared.messages import PrefixDigest, Request
from shared.sites.prefix_fingerprints import PrefixFingerprints, unpack_fingerprints
from shared.subjects import SITE_SEPARATOR

MAX_FINGERPRINTS = 2**19  # of all sites, in equal shares: about 60 MB
MIN_SHARES = 16
MAX_GATEWAYS = 64  # of one site and class: the last ones are remembered
MAX_PER_S = 16_384  # fingerprints of one site; a message counts as MESSAGE_COST
BURST_S = 2.0
MESSAGE_COST = 64
SILENT_S = 300.0  # five snapshots


@dataclass(eq=False, slots=True)
class _DigestSender:
    """A gateway of another site, in step with what it has sent of one region class."""

    gateway_id: str
    region_class: str
    site: str
    bit: int
    epoch: int
    number: int
    heard_at: float
    fingerprints: set[int] = field(default_factory=set)

    def is_next(self, digest: PrefixDigest) -> bool:
        return (digest.epoch, digest.sequence_number) == (self.epoch, self.number + 1)

    def has_taken(self, digest: PrefixDigest) -> bool:
        return digest.epoch == self.epoch and digest.sequence_number <= self.number


class _DigestSite:
    """The gateways of a site, and how many fingerprints it may send."""

    def __init__(self, now: float) -> None:
        self.gateways: dict[tuple[str, str], _DigestSender] = {}  # by id and region class
        self.allowance = Allowance(MAX_PER_S * BURST_S, BURST_S, now)

    @property
    def num_fingerprints(self) -> int:
        return sum(len(each.fingerprints) for each in self.gateways.values())


class SitePrefixes:
    def __init__(self) -> None:
        self._sites: dict[str, _DigestSite] = {}  # those of the servers' configuration
        # By region class, those of this process: bits of gateways by fingerprint
        self._holders: dict[str, dict[int, int]] = {}
        self._of_bit: list[_DigestSender | None] = []  # by the number of its bit
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """Returns the number of fingerprints."""
        return sum(map(len, self._holders.values()))

    # ── digests ──────────────────────────────────────────────────────────────────────────────────

    def take(self, digest: PrefixDigest, now: float) -> bool:
        """Takes in a digest. Returns False if its gateway is out of step, and must send a snapshot
        before it counts again.
        """
        name = digest.gateway_id.partition(SITE_SEPARATOR)[0]
        site = self._sites.setdefault(name, _DigestSite(now))
        gateway = site.gateways.get((digest.gateway_id, digest.region_class))
        added, removed = unpack_fingerprints(digest.added), unpack_fingerprints(digest.removed)
        if not site.allowance.takes(MESSAGE_COST + len(added) + len(removed), now):
            self._drop(gateway)
            return False
        if gateway is not None and gateway.has_taken(digest):
            return True
        if gateway is None or not gateway.is_next(digest):
            self._drop(gateway)
            if not digest.is_first:
                return False
            gateway = self._begin(site, name, digest, now)
        gateway.number, gateway.heard_at = digest.sequence_number, now
        self._remove(gateway, removed)
        room = MAX_FINGERPRINTS // max(len(self._sites), MIN_SHARES) - site.num_fingerprints
        self._add(gateway, added[: max(room, 0)])
        return True

    def lost(self, gateway_id: str) -> None:
        """Drops what a gateway has sent: its link is cut, or it has left."""
        site = self._sites.get(gateway_id.partition(SITE_SEPARATOR)[0])
        for each in list(site.gateways.values()) if site is not None else ():
            if each.gateway_id == gateway_id:
                self._drop(each)

    def withdraw(self, site: str, region_class: str) -> None:
        """Drops what a site has sent of a region class, which does not contain its region."""
        known = self._sites.get(site)
        for each in list(known.gateways.values()) if known is not None else ():
            if each.region_class == region_class:
                self._drop(each)

    def drop_silent(self, now: float) -> None:
        for site in self._sites.values():
            for gateway in list(site.gateways.values()):
                if now - gateway.heard_at > SILENT_S:
                    self._drop(gateway)

    # ── queries ──────────────────────────────────────────────────────────────────────────────────

    def num_blocks(self, request: Request) -> dict[str, int]:
        """Returns the leading blocks of the prompt that each site holds; sites without are left
        out.
        """
        prompt = PrefixFingerprints(request.cache_root, request.block_hashes, request.block_size)
        holders = self._holders.get(request.region_class, {})
        at, holders_of, longest = prompt.at, holders.get, len(prompt)
        holding = holders_of(at(0)) if longest else None
        if not holding:
            return {}
        found: dict[str, int] = {}
        whole = holding & holders_of(at(longest - 1), 0)
        if whole:
            self._record(found, whole, longest * prompt.blocks_each)
        ranges = [(1, longest - 1, holding ^ whole)]  # bits, and the fewest and most that they hold
        while ranges:
            least, most, bits = ranges.pop()
            if least >= most:
                self._record(found, bits, least * prompt.blocks_each)
                continue
            middle = (least + most + 1) // 2
            deeper = bits & holders_of(at(middle - 1), 0)
            if deeper:
                ranges.append((middle, most, deeper))
            if deeper != bits:
                ranges.append((least, middle - 1, bits ^ deeper))
        return found

    def _record(self, found: dict[str, int], bits: int, num_blocks: int) -> None:
        """Takes the deepest of a site's gateways: they share one index, and each reports whole
        prefixes.
        """
        while bits:
            bit = bits & -bits
            bits ^= bit
            gateway = self._of_bit[bit.bit_length() - 1]
            if gateway is not None and found.get(gateway.site, 0) < num_blocks:
                found[gateway.site] = num_blocks

    # ── internals ────────────────────────────────────────────────────────────────────────────────

    def _begin(
        self, site: _DigestSite, name: str, digest: PrefixDigest, now: float
    ) -> _DigestSender:
        region_class = digest.region_class
        of_class = [each for each in site.gateways.values() if each.region_class == region_class]
        if len(of_class) >= MAX_GATEWAYS:
            self._drop(min(of_class, key=lambda each: each.heard_at))
        if not self._free_bits:
            self._free_bits.append(len(self._of_bit))
            self._of_bit.append(None)
        number = self._free_bits.pop()
        gateway = _DigestSender(
            digest.gateway_id,
            region_class,
            name,
            1 << number,
            digest.epoch,
            digest.sequence_number,
            now,
        )
        self._of_bit[number] = site.gateways[digest.gateway_id, region_class] = gateway
        return gateway

    def _drop(self, gateway: _DigestSender | None) -> None:
        if gateway is None:
            return
        self._remove(gateway, list(gateway.fingerprints))
        number = gateway.bit.bit_length() - 1
        self._of_bit[number] = None
        self._free_bits.append(number)
        del self._sites[gateway.site].gateways[gateway.gateway_id, gateway.region_class]

    def _add(self, gateway: _DigestSender, fingerprints: list[int]) -> None:
        holders, bit = self._holders.setdefault(gateway.region_class, {}), gateway.bit
        gateway.fingerprints.update(fingerprints)
        for each in fingerprints:
            known = holders.get(each)
            holders[each] = bit if known is None else known | bit  # most share their gateway's int

    def _remove(self, gateway: _DigestSender, fingerprints: list[int]) -> None:
        holders, others = self._holders.get(gateway.region_class, {}), ~gateway.bit
        for each in fingerprints:
            if each in gateway.fingerprints:
                gateway.fingerprints.discard(each)
                left = holders[each] & others
                if left:
                    holders[each] = left
                else:
                    del holders[each]
