"""The bookkeeping of the paged KV cache: references to blocks, and the prefix cache.

Any block serves any group of layers; a block with a hash holds the KV of one group, and is found by
hash and group.

Every block is in exactly one of three sets:

    empty        no references, content unused
    cached       no references, but a known hash: a later request may match it; LRU order
    referenced   held by `ref_count` > 0 sequences

The number of blocks may change. A referenced block above a smaller number is in none of the three
sets: it is not findable, and retires once it is released.

A block gets its hash once it is full and computed. Allocation takes empty blocks first, then evicts
the least recently used cached one, pinned blocks last. A sequence's blocks become evictable tail
first, so that the remaining blocks of a prefix are still a prefix.

A tenant may have a quota of findable blocks. A tenant over its quota immediately loses its least
recently used cached blocks, pinned ones last, even if other blocks are empty. Blocks that sequences
hold are evicted when they are released, if the tenant is then still over its quota.

Blocks of a request with zero retention never get a hash, and are cleared once they are free: see
`allocate`. Others keep what was written after they are free: the pool knows of which tenants that
is, also of a part that the next holder has not overwritten, and `drop_tenant` has it cleared.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from shared.engine.batching.block_tenants import BlockTenants
from shared.engine.batching.cached_block import CachedBlock, runs_of
from shared.engine.batching.prefix_match import CachedPrefix, match_prefix
from shared.engine.batching.tenant_quota import TenantQuota
from shared.kv_layout import Reach, first_seen
from shared.messages import BlocksCleared, BlocksRemoved, BlocksStored
from shared.packing import pack_hashes

KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        reaches: tuple[Reach, ...] = (None,),
        notes_freed: bool = False,
    ) -> None:
        """Creates an empty pool. `reaches` has one entry for each group of layers. With
        `notes_freed` the owner of the cache clears all freed blocks, see `take_freed`.
        """
        self.reaches = reaches
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.notes_freed = notes_freed
        self.ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._last_evictable: OrderedDict[int, None] = OrderedDict()  # likewise, of pinned ones
        # Pinned block hashes of each group, cached or not.
        self._pins: list[Counter[bytes]] = [Counter() for _ in reaches]
        self._known: list[CachedBlock | None] = [None] * num_blocks
        self._block_ids: list[dict[bytes, int]] = [{} for _ in reaches]
        self._shares: dict[str, TenantQuota] = {}
        self._tenants = BlockTenants()
        self._freed: set[int] = set()
        self._private: set[int] = set()  # blocks to be cleared once they are free
        self._has_retired = False
        self._events: dict[str, list[KvEvent]] = {"": []}  # of each region class so far
        self._removed: list[CachedBlock] = []  # blocks removed after the last of `_events`
        self.on_event: Callable[[], None] = lambda: None  # called when `take_events` has events

    @property
    def num_free_blocks(self) -> int:
        """Blocks available to an allocation: empty and cached ones."""
        return len(self._empty) + self.num_cached_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._evictable) + len(self._last_evictable)

    @property
    def num_retiring_blocks(self) -> int:
        """Referenced blocks above the number of blocks."""
        return sum(count > 0 for count in self.ref_counts[self.num_blocks :])

    @property
    def num_pinned_blocks(self) -> int:
        """Number of pinned blocks of all groups, cached or not."""
        return sum(map(len, self._pins))

    def num_pinned_with(self, block_hashes: Sequence[bytes]) -> int:
        """Returns the number of pinned blocks if this prefix was also pinned."""
        parts = self._resumable(block_hashes)
        return sum(
            len(pins.keys() | set(part)) for pins, part in zip(self._pins, parts, strict=True)
        )

    def pin(self, block_hashes: Sequence[bytes]) -> None:
        """Pins a prefix: the blocks that continue it are evicted after all others. Each pin needs
        one `unpin`.
        """
        for group, part in enumerate(self._resumable(block_hashes)):
            for block_hash in reversed(part):
                self._pins[group][block_hash] += 1
                self._move(group, block_hash, is_pinned=True)

    def unpin(self, block_hashes: Sequence[bytes]) -> None:
        """Reverses one `pin`; cached blocks become the most recently used."""
        for group, part in enumerate(self._resumable(block_hashes)):
            pins = self._pins[group]
            for block_hash in reversed(part):
                pins[block_hash] -= 1
                if pins[block_hash] <= 0:
                    del pins[block_hash]
                    self._move(group, block_hash, is_pinned=False)

    def _resumable(self, block_hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
        """[G] the blocks of each group that the token after the prefix sees."""
        position = len(block_hashes) * self.block_size
        return [
            block_hashes[first_seen(reach, position) // self.block_size :] for reach in self.reaches
        ]

    def _move(self, group: int, block_hash: bytes, *, is_pinned: bool) -> None:
        """Moves a block that is pinned now, or no longer, in the orders of eviction."""
        block_id = self._block_ids[group].get(block_hash)
        if block_id is None:
            return
        share = self._share_of(block_id)
        first = self._evictable, share.evictable
        last = self._last_evictable, share.last_evictable
        for source, target in zip(*((first, last) if is_pinned else (last, first)), strict=True):
            if block_id in source:
                del source[block_id]
                target[block_id] = None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        return self.ref_counts[block_id]

    def match(self, block_hashes: Sequence[bytes]) -> CachedPrefix:
        """Returns the longest cached prefix that can be continued, without holding it: see
        `hold`.
        """
        return match_prefix(self._block_ids, self.reaches, block_hashes, self.block_size)

    def num_evictable_in(self, block_ids: Iterable[int]) -> int:
        """Returns how many of these blocks are free now and would not be once held."""
        return sum(self.ref_counts[block_id] == 0 for block_id in block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                for order in self._orders_of(self._known[block_id]):
                    del order[block_id]
            self.ref_counts[block_id] += 1

    def allocate(self, count: int, *, tenant_id: str = "", is_private: bool = False) -> list[int]:
        """Allocates blocks for KV of a tenant; private ones are cleared once they are free. Raises
        ValueError if fewer are free: callers check `num_free_blocks` first.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks requested, {self.num_free_blocks} free")
        block_ids = [self._take() for _ in range(count)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        crowded = self._tenants.allocated(block_ids, tenant_id)
        self._private.update(block_ids if is_private else crowded)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference to each; the last block becomes evictable first."""
        for block_id in reversed(block_ids):
            if self.ref_counts[block_id] <= 0:
                raise ValueError(f"block {block_id} is released more often than held")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] > 0:
                continue
            known = self._known[block_id]
            if known is None:
                self._note_freed(block_id)
                if block_id < self.num_blocks:
                    self._empty.append(block_id)
                else:
                    self._has_retired = True
            else:
                for order in self._orders_of(known):
                    order[block_id] = None
                self._trim(self._shares[known.tenant_id])

    def _orders_of(self, block: CachedBlock | None) -> tuple[OrderedDict[int, None], ...]:
        """Returns the orders in which a block is evicted: the pool's, and its tenant's."""
        assert block is not None, "an empty block is not evicted"
        share = self._shares[block.tenant_id]
        if block.block_hash in self._pins[block.group]:
            return self._last_evictable, share.last_evictable
        return self._evictable, share.evictable

    def commit(
        self,
        group: int,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        *,
        tenant_id: str,
        parent_hash: bytes,
        first_block_index: int,
        kv_quota_tokens: int = 0,
        region_class: str = "",
    ) -> None:
        """Makes full, computed blocks of one group findable, unless they retire. A hash that is
        already known stays with its block. For `kv_quota_tokens`, see `limit`.
        """
        new: list[CachedBlock] = []
        ids_of = self._block_ids[group]
        pairs = zip(block_ids, block_hashes, strict=True)
        for block_index, (block_id, block_hash) in enumerate(pairs, first_block_index):
            is_new = block_hash not in ids_of and self._known[block_id] is None
            if is_new and block_id < self.num_blocks:
                block = CachedBlock(
                    tenant_id, parent_hash, block_index, block_hash, group, region_class
                )
                self._known[block_id] = block
                self._tenants.filled(block_id, tenant_id)
                ids_of[block_hash] = block_id
                new.append(block)
            parent_hash = block_hash
        if new:
            self._shares.setdefault(tenant_id, TenantQuota()).num_blocks += len(new)
            self._end_removal()
            self._events.setdefault(region_class, []).extend(runs_of(new))
            self.on_event()
        self.limit(tenant_id, kv_quota_tokens)

    def limit(self, tenant_id: str, kv_quota_tokens: int) -> None:
        """Limits the tenant's findable blocks to `kv_quota_tokens` in each group, until the next
        call or until it has no findable block left; 0: unlimited.
        """
        share = self._shares.get(tenant_id)
        if share is not None:
            max_blocks = kv_quota_tokens // self.block_size * len(self.reaches)
            share.max_blocks = max_blocks if kv_quota_tokens else None
            self._trim(share)

    def num_blocks_of(self, tenant_id: str) -> int:
        """Returns the tenant's findable blocks, held or not."""
        share = self._shares.get(tenant_id)
        return 0 if share is None else share.num_blocks

    def quota_tokens_of(self, tenant_id: str) -> int:
        """Returns the tenant's current limit; 0: unlimited."""
        share = self._shares.get(tenant_id)
        max_blocks = None if share is None else share.max_blocks
        return 0 if max_blocks is None else max_blocks // len(self.reaches) * self.block_size

    def resize(self, num_blocks: int) -> None:
        """Changes the number of blocks; the highest ones are added or removed.

        Of the removed blocks, cached ones are evicted, and referenced ones retire once they are
        released: see `take_retired`.
        """
        before, self.num_blocks = self.num_blocks, num_blocks
        num_missing = num_blocks - len(self.ref_counts)
        self.ref_counts += [0] * num_missing
        self._known += [None] * num_missing
        added = range(num_blocks - 1, before - 1, -1)
        # the lowest are allocated first, so that few are held above a later, smaller number
        self._empty[:0] = [each for each in added if self.ref_counts[each] == 0]
        if num_blocks < before:
            self._shrink()

    def _shrink(self) -> None:
        if self.num_blocks == 0 and any(self._block_ids):
            self._clear()
        for block_id in range(self.num_blocks, len(self._known)):
            if self._known[block_id] is not None:
                self._evict(block_id)
        self._empty = [each for each in self._empty if each < self.num_blocks]
        self._has_retired = True

    def _clear(self) -> None:
        """Evicts all blocks, with one event that replaces those before it."""
        for block_id, known in enumerate(self._known):
            if known is not None:
                self._evict(block_id)
        self._removed, self._events = [], {each: [BlocksCleared()] for each in self._events}
        self.on_event()

    @property
    def has_retired(self) -> bool:
        """Whether `take_retired` returns blocks."""
        return self._has_retired

    def take_retired(self) -> list[int]:
        """Returns all blocks above the number of blocks that nothing refers to, if one of them has
        retired since the last call: their memory may be given back until they are added again.
        """
        if not self._has_retired:
            return []
        self._has_retired = False
        above = range(self.num_blocks, len(self.ref_counts))
        retired = [block_id for block_id in above if self.ref_counts[block_id] == 0]
        self._note_cleared(retired)
        return retired

    @property
    def event_classes(self) -> list[str]:
        """The region classes of blocks since the start, and "" for those without."""
        return list(self._events)

    def take_events(self, region_class: str = "") -> list[KvEvent]:
        """Returns what has happened since the last call to the blocks of one region class, or to
        those without.
        """
        self._end_removal()
        events, self._events[region_class] = self._events.get(region_class, []), []
        return events

    def drop_tenant(self, tenant_id: str) -> int:
        """Makes all blocks of a tenant unfindable, and has all that may have KV of it cleared once
        they are free. Returns the number of those that were findable.
        """
        own = sorted(self._tenants.of(tenant_id))
        findable = [each for each in own if self._known[each] is not None]
        for block_id in findable:
            self._evict(block_id)
            if self.ref_counts[block_id] == 0:
                self._empty.append(block_id)
        for block_id in own:
            self._clear_once_free(block_id)
        return len(findable)

    def _clear_once_free(self, block_id: int) -> None:
        if self.ref_counts[block_id] > 0:
            self._private.add(block_id)
        elif block_id < self.num_blocks:  # the memory of others is given back
            self._freed.add(block_id)

    def make_private(self, block_ids: Iterable[int]) -> None:
        """Has these blocks cleared once they are free."""
        self._private.update(block_ids)

    def record_freed(self, block_ids: Iterable[int]) -> None:
        """Marks blocks to be cleared."""
        self._freed.update(block_ids)

    @property
    def has_freed(self) -> bool:
        """Whether `take_freed` returns blocks."""
        return bool(self._freed)

    def take_freed(self) -> list[int]:
        """Returns the blocks to be cleared that became unreferenced and unfindable since the last
        call. They may have been allocated again since: the new holders must not write before the
        blocks are cleared.
        """
        freed, self._freed = sorted(self._freed), set()
        self._note_cleared(freed)
        return freed

    def _note_cleared(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self._known[block_id] is None:  # else it is full again
                self._tenants.cleared(block_id, is_held=self.ref_counts[block_id] > 0)

    def cached_blocks(self, region_class: str = "") -> list[CachedBlock]:
        """Returns the findable blocks of a region class, or those without, parents before
        children.
        """
        known = (each for each in self._known if each is not None)
        own = [each for each in known if each.region_class == region_class]
        return sorted(own, key=attrgetter("tenant_id", "group", "block_index"))

    def check(self) -> None:
        """Raises AssertionError unless each block is in exactly one of the three sets."""
        referenced = {b for b in range(self.num_blocks) if self.ref_counts[b] > 0}
        above = self._known[self.num_blocks :]
        assert not any(above), "a block above the number of blocks is findable"
        empty, evictable = set(self._empty), {*self._evictable, *self._last_evictable}
        assert len(evictable) == self.num_cached_blocks, "a block is both pinned and not pinned"
        assert len(empty) == len(self._empty), "a block is listed as empty twice"
        assert not (empty & evictable or empty & referenced or evictable & referenced)
        assert len(empty) + len(evictable) + len(referenced) == self.num_blocks
        assert max(empty | evictable, default=-1) < self.num_blocks
        assert all(self._known[block_id] is not None for block_id in evictable)
        assert all(self._known[block_id] is None for block_id in empty)
        found = {
            block_id: (block.group, block.block_hash)
            for block_id, block in enumerate(self._known)
            if block is not None
        }
        assert found == {
            block_id: (group, block_hash)
            for group, ids_of in enumerate(self._block_ids)
            for block_hash, block_id in ids_of.items()
        }, "a block is found under another hash or group than its own"
        self._check_shares()

    def _check_shares(self) -> None:
        num_blocks = Counter(block.tenant_id for block in self._known if block is not None)
        assert num_blocks == {each: share.num_blocks for each, share in self._shares.items()}
        for tenant_id, share in self._shares.items():
            for order, of_share in (
                (self._evictable, share.evictable),
                (self._last_evictable, share.last_evictable),
            ):
                own = [each for each in order if self._tenant_of(each) == tenant_id]
                assert own == [*of_share], "pool and tenant have different orders of eviction"
            assert not share.has_to_give, "a tenant over its quota has cached blocks"

    def _tenant_of(self, block_id: int) -> str:
        block = self._known[block_id]
        assert block is not None
        return block.tenant_id

    def _share_of(self, block_id: int) -> TenantQuota:
        return self._shares[self._tenant_of(block_id)]

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        block_id = next(iter(self._evictable or self._last_evictable))
        self._evict(block_id)
        return block_id

    def _trim(self, share: TenantQuota) -> None:
        while share.has_to_give:
            block_id = next(iter(share.evictable or share.last_evictable))
            self._evict(block_id)
            self._empty.append(block_id)

    def _evict(self, block_id: int) -> None:
        block = self._known[block_id]
        assert block is not None
        share = self._shares[block.tenant_id]
        if self.ref_counts[block_id] == 0:
            for order in self._orders_of(block):
                del order[block_id]
            self._note_freed(block_id)
        del self._block_ids[block.group][block.block_hash]
        self._known[block_id] = None
        share.num_blocks -= 1
        if share.num_blocks == 0:
            del self._shares[block.tenant_id]
        self._removed.append(block)
        if len(self._removed) == 1:
            self.on_event()

    def _note_freed(self, block_id: int) -> None:
        if self.notes_freed or block_id in self._private:
            self._private.discard(block_id)
            self._freed.add(block_id)

    def _end_removal(self) -> None:
        if not self._removed:
            return
        removed: dict[tuple[str, int], list[bytes]] = {}
        for block in self._removed:
            removed.setdefault((block.region_class, block.group), []).append(block.block_hash)
        for (region_class, group), hashes in sorted(removed.items()):
            event = BlocksRemoved(block_hashes=pack_hashes(hashes), group=group)
            self._events[region_class].append(event)
        self._removed = []
