"""The prefixes that are pinned in one worker's cache, each under a lease.

Their blocks are evicted after all others, within a share of the pool, so that pins cannot starve
running sequences of what they could otherwise evict. A prefix that is not there is computed as a
prefill that nobody waits for, when nobody else waits either.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.block_hash import extend_chain
from shared.clock import Clock
from shared.engine.batching.sequence import Sequence, build_sequence
from shared.engine.engine import Engine, StepProgress
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import KeepPins, PinPrefix, PinsKept, PrefixPinned
from shared.packing import pack_hashes, unpack_hashes, unpack_token_ids

MAX_COMPUTING = 2  # prefixes at a time: they share steps with what users wait for
_ID_PREFIX = b"pin:"


@dataclass(slots=True)
class _Pin:
    block_hashes: list[bytes]
    until: float


class PinnedPrefixes:
    def __init__(self, engine: Engine, clock: Clock, *, max_share: float = 0.25) -> None:
        """`max_share` of the pool's blocks may be pinned."""
        self._engine = engine
        self._clock = clock
        self._max_blocks = int(engine.pool.num_blocks * max_share)
        self._pins: dict[bytes, _Pin] = {}  # by the hash of the last block
        self._computing: dict[bytes, Sequence] = {}  # by sequence id

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, command: PinPrefix, sequence: Sequence) -> PrefixPinned:
        """`sequence` is its prefill. Raises WorkerBusy beyond the share, InvalidRequest for what
        this engine can never hold.
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
            self._pins[tip] = _Pin(list(hashes), 0.0)
        self._pins[tip].until = self._clock.now() + command.lease_s
        num_cached = len(pool.match(hashes))
        is_computing = num_cached < len(hashes) and self._compute(sequence)
        return PrefixPinned(num_cached_blocks=num_cached, is_computing=is_computing)

    def renew(self, command: KeepPins) -> PinsKept:
        """Lets go of what is not named."""
        until = self._clock.now() + command.lease_s
        named = dict.fromkeys(unpack_hashes(command.tip_hashes))
        for tip in [each for each in self._pins if each not in named]:
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
        if not self._computing:  # as a rule
            return
        for each in progress:
            sequence = self._computing.get(each.sequence.sequence_id)
            is_over = each.finish_reason is not None or each.sequence.num_uncomputed_tokens == 0
            if sequence is not None and is_over:
                del self._computing[sequence.sequence_id]
                self._engine.release(sequence)

    def stop(self) -> None:
        for sequence in self._computing.values():
            self._engine.abort(sequence)
        self._computing.clear()

    def _compute(self, sequence: Sequence) -> bool:
        if sequence.sequence_id in self._computing:
            return True
        is_full = len(self._computing) >= MAX_COMPUTING
        if is_full or self._engine.batcher.waiting:
            return False
        # a pin knows nothing of quotas, and must not lift its tenant's
        sequence.kv_quota_tokens = self._engine.pool.quota_tokens_of(sequence.tenant_id)
        self._engine.add(sequence)
        self._computing[sequence.sequence_id] = sequence
        return True

    def _release(self, tip: bytes) -> None:
        self._engine.pool.unpin(self._pins.pop(tip).block_hashes)


def sequence_of(command: PinPrefix, block_size: int) -> Sequence:
    """Raises InvalidRequest unless it is whole blocks, each with its hash: nobody waits for it and
    would notice that KV is found under another's name.
    """
    token_ids, hashes = unpack_token_ids(command.token_ids), unpack_hashes(command.block_hashes)
    if not hashes or len(token_ids) != len(hashes) * block_size:
        raise InvalidRequest(f"{len(token_ids)} tokens to pin are not {len(hashes)} whole blocks")
    if command.num_public_blocks not in (0, len(hashes)):
        raise InvalidRequest(f"{command.num_public_blocks} public blocks of {len(hashes)}")
    if extend_chain(command.cache_root, token_ids, block_size) != hashes:
        raise InvalidRequest("the hashes are not those of the tokens to pin")
    return build_sequence(command, token_ids, sequence_id=_ID_PREFIX + hashes[-1])
