"""The prefixes that are pinned in one worker's cache, each under a lease.

Their blocks are evicted after all others. A limit on their share of the pool leaves enough
evictable blocks for running sequences. A missing prefix is computed as a prefill while no sequence
waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.block_hash import image_extras, prompt_chain
from shared.clock import Clock
from shared.engine.batching.sequence import Sequence, build_sequence
from shared.engine.engine import Engine, StepProgress
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import KeepPins, PinPrefix, PinsKept, PrefixPinned
from shared.packing import pack_hashes, unpack_hashes, unpack_token_ids

MAX_COMPUTING = 2  # concurrent prefixes: they share steps with users' requests
_ID_PREFIX = b"pin:"


@dataclass(slots=True)
class _Pin:
    tenant_id: str
    block_hashes: list[bytes]
    region_class: str
    until: float


class PinnedPrefixes:
    def __init__(self, engine: Engine, clock: Clock, *, max_share: float = 0.25) -> None:
        """Keeps prefixes in the cache. The share `max_share` of the pool's blocks may be pinned."""
        self._engine = engine
        self._clock = clock
        self._max_share = max_share
        self._pins: dict[bytes, _Pin] = {}  # key: hash of the last block
        self._computing: dict[bytes, Sequence] = {}  # key: sequence id

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def _max_blocks(self) -> int:
        return int(self._engine.pool.num_blocks * self._max_share)

    def pin(self, command: PinPrefix, sequence: Sequence) -> PrefixPinned:
        """Pins a prefix; `sequence` is its prefill. Raises WorkerBusy above the share, and
        `Engine.check_fits` errors for a prefix longer than the context.
        """
        pool, hashes = self._engine.pool, sequence.block_hashes
        self._engine.check_fits(sequence.num_tokens)
        tip = hashes[-1]
        if tip not in self._pins:
            if pool.num_pinned_with(hashes) > self._max_blocks:
                raise WorkerBusy(
                    f"{pool.num_pinned_with(hashes)} blocks would be pinned, more than "
                    f"{self._max_blocks}"
                )
            pool.pin(hashes)
            self._pins[tip] = _Pin(command.tenant_id, list(hashes), command.region_class, 0.0)
        self._pins[tip].until = self._clock.now() + command.lease_s
        num_cached = pool.match(hashes).num_blocks
        is_computing = num_cached < len(hashes) and self._compute(sequence)
        return PrefixPinned(num_cached_blocks=num_cached, is_computing=is_computing)

    def renew(self, command: KeepPins) -> PinsKept:
        """Renews the named pins and releases all others of their region class."""
        until = self._clock.now() + command.lease_s
        named = dict.fromkeys(unpack_hashes(command.tip_hashes))
        own = (tip for tip, pin in self._pins.items() if pin.region_class == command.region_class)
        for tip in [each for each in own if each not in named]:
            self._release(tip)
        for tip in named:
            if tip in self._pins:
                self._pins[tip].until = until
        missing = [tip for tip in named if tip not in self._pins]
        return PinsKept(missing_tip_hashes=pack_hashes(missing))

    def expire(self) -> None:
        now = self._clock.now()
        for tip in [each for each, pin in self._pins.items() if pin.until < now]:
            self._release(tip)

    def on_step(self, progress: list[StepProgress]) -> None:
        if not self._computing:  # the common case
            return
        for each in progress:
            sequence = self._computing.get(each.sequence.sequence_id)
            is_over = each.finish_reason is not None or each.sequence.num_uncomputed_tokens == 0
            if sequence is not None and is_over:
                del self._computing[sequence.sequence_id]
                self._engine.release(sequence)
                _close_images(sequence)

    def clear(self) -> None:
        """Releases all pins, and ends the prefills that compute one."""
        self.stop()
        for tip in list(self._pins):
            self._release(tip)

    def drop(self, tenant_ids: frozenset[str]) -> None:
        """Releases the pins of tenants, and ends the prefills that compute one."""
        for sequence_id, sequence in list(self._computing.items()):
            if sequence.tenant_id in tenant_ids:
                self._abort(sequence_id)
        for tip in [each for each, pin in self._pins.items() if pin.tenant_id in tenant_ids]:
            self._release(tip)

    def stop(self) -> None:
        for sequence_id in list(self._computing):
            self._abort(sequence_id)

    def _abort(self, sequence_id: bytes) -> None:
        """Ends the prefill of a pin, if it runs: no image is fetched for one that is deleted."""
        sequence = self._computing.pop(sequence_id, None)
        if sequence is not None:
            self._engine.abort(sequence)
            _close_images(sequence)

    def _compute(self, sequence: Sequence) -> bool:
        if sequence.sequence_id in self._computing:
            return True
        is_full = len(self._computing) >= MAX_COMPUTING
        if is_full or self._engine.batcher.waiting:
            return False
        # a pin carries no quota, and must not remove its tenant's
        sequence.kv_quota_tokens = self._engine.pool.quota_tokens_of(sequence.tenant_id)
        self._engine.add(sequence)
        self._computing[sequence.sequence_id] = sequence
        return True

    def _release(self, tip: bytes) -> None:
        self._abort(_ID_PREFIX + tip)
        self._engine.pool.unpin(self._pins.pop(tip).block_hashes)


def _close_images(sequence: Sequence) -> None:
    if sequence.images is not None:
        sequence.images.close()


def sequence_of(command: PinPrefix, block_size: int) -> Sequence:
    """Returns the prefill of a pin. Raises InvalidRequest unless the tokens are full blocks with
    the right hashes: with wrong hashes, other requests would silently match this KV.
    """
    token_ids, hashes = unpack_token_ids(command.token_ids), unpack_hashes(command.block_hashes)
    if not hashes or len(token_ids) != len(hashes) * block_size:
        raise InvalidRequest(f"{len(token_ids)} tokens to pin are not {len(hashes)} full blocks")
    num_public = command.num_public_blocks
    has_root = command.public_root is not None or num_public in (0, len(hashes))
    if num_public > len(hashes) or not has_root:
        raise InvalidRequest(f"{num_public} of {len(hashes)} blocks are public, or have no root")
    expected = prompt_chain(
        command.token_ids,
        block_size,
        cache_root=command.cache_root,
        public_root=command.public_root,
        num_public_blocks=num_public,
        extras=image_extras(command.images, block_size),
    )
    if expected != hashes:
        raise InvalidRequest("the block hashes do not match the tokens to pin")
    return build_sequence(command, token_ids, sequence_id=_ID_PREFIX + hashes[-1])
