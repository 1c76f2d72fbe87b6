from __future__ import annotations

import msgspec
import pytest

from shared.block_hash import extend_chain, root_hash
from shared.engine.pinned_prefixes import PinnedPrefixes, sequence_of
from shared.errors import ContextFull, InvalidRequest, WorkerBusy
from shared.messages import KeepPins, PinPrefix, PrefixPinned
from shared.packing import pack_hashes, pack_token_ids
from tests.support.engine.rig import BLOCK_SIZE, Rig, greedy, new_sequence, prompt

LEASE_S = 10.0


class ManualClock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError("sleep is not expected")


class Pinned:
    """A rig of 16 blocks, of which a quarter can be pinned."""

    def __init__(self) -> None:
        self.rig = Rig(num_blocks=16)
        self.clock = ManualClock()
        self.pins = PinnedPrefixes(self.rig.engine, self.clock)

    def pin(self, command: PinPrefix) -> PrefixPinned:
        return self.pins.pin(command, sequence_of(command, BLOCK_SIZE))

    def run(self) -> None:
        """Steps the engine and calls `on_step` as the engine loop does."""
        engine = self.rig.engine
        while not engine.is_idle:
            rows, progress = engine.schedule()
            self.pins.on_step(progress)
            if rows:
                self.pins.on_step(engine.apply(rows, self.rig.computed(rows)))

    def fill(self, start: int) -> None:
        """Computes other prompts, which take all evictable blocks."""
        for number in range(8):
            self.rig.complete(new_sequence(prompt(15, start=start + 100 * number), greedy(1)))


def command(num_blocks: int, *, start: int = 100) -> PinPrefix:
    token_ids = prompt(num_blocks * BLOCK_SIZE, start=start)
    root = root_hash("tenant-a", "weights")
    return PinPrefix(
        tenant_id="tenant-a",
        model="m",
        revision="r",
        cache_root=root,
        token_ids=pack_token_ids(token_ids),
        block_hashes=pack_hashes(extend_chain(root, token_ids, BLOCK_SIZE)),
        lease_s=LEASE_S,
    )


def renew(*commands: PinPrefix) -> KeepPins:
    return KeepPins(
        tip_hashes=b"".join(each.block_hashes[-16:] for each in commands), lease_s=LEASE_S
    )


def test_pinned_prefix_is_computed_and_not_evicted() -> None:
    pinned = Pinned()
    reply = pinned.pin(command(3))
    assert (reply.num_cached_blocks, reply.is_computing) == (0, True)
    pinned.run()
    pinned.fill(1000)
    assert pinned.pin(command(3)).num_cached_blocks == 3
    assert pinned.rig.engine.is_idle


def test_unpinned_prefix_is_evicted() -> None:
    """Without the pin, the same prompts evict the blocks."""
    pinned = Pinned()
    pinned.pin(command(3))
    pinned.run()
    assert pinned.pins.renew(renew()).missing_tip_hashes == b""
    pinned.fill(1000)
    assert pinned.pin(command(3)).num_cached_blocks == 0


def test_lease_expires_without_renewal() -> None:
    pinned = Pinned()
    pinned.pin(command(2))
    pinned.clock.at = LEASE_S - 1
    pinned.pins.renew(renew(command(2)))
    pinned.clock.at = LEASE_S + 1
    pinned.pins.expire()
    assert len(pinned.pins) == 1
    pinned.clock.at = 2 * LEASE_S
    pinned.pins.expire()
    assert len(pinned.pins) == pinned.rig.engine.pool.num_pinned_blocks == 0


def test_renew_reports_missing_pins() -> None:
    pinned = Pinned()
    pinned.pin(command(2))
    other = command(1, start=700)
    renewed = pinned.pins.renew(renew(command(2), other))
    assert renewed.missing_tip_hashes == other.block_hashes


def test_pins_are_limited_to_a_share_of_the_cache() -> None:
    pinned = Pinned()
    pinned.pin(command(3))
    with pytest.raises(WorkerBusy, match="5 blocks would be pinned, more than 4"):
        pinned.pin(command(2, start=700))
    pinned.pin(command(4))  # shares three blocks with the first
    assert pinned.rig.engine.pool.num_pinned_blocks == 4


def test_pinning_again_adds_no_work() -> None:
    pinned = Pinned()
    pinned.pin(command(3))
    assert pinned.pin(command(3)).is_computing
    assert len(pinned.rig.engine.batcher.waiting) == 1
    pinned.run()
    assert not pinned.pin(command(3)).is_computing
    pinned.pins.renew(renew())
    assert pinned.rig.engine.pool.num_pinned_blocks == 0


def test_prefix_is_not_computed_while_requests_wait() -> None:
    pinned = Pinned()
    for number in range(2):
        pinned.rig.engine.add(new_sequence(prompt(8, start=700 + number * 50), greedy(1)))
    assert not pinned.pin(command(3)).is_computing
    pinned.run()
    assert pinned.pin(command(3)).is_computing


def test_stop_leaves_the_engine_idle() -> None:
    pinned = Pinned()
    pinned.pin(command(3))
    pinned.pins.stop()
    assert pinned.rig.engine.is_idle


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": pack_token_ids(prompt(5))},
        {"token_ids": b"", "block_hashes": b""},
        {"num_public_blocks": 3},
        {"num_public_blocks": 1},
        {"num_public_blocks": 1, "public_root": root_hash("", "weights")},
        {"num_public_blocks": 3, "public_root": root_hash("tenant-a", "weights")},
        {"cache_root": root_hash("tenant-b", "weights")},
        {"token_ids": pack_token_ids(prompt(2 * BLOCK_SIZE, start=101))},
    ],
)
def test_pin_without_full_blocks_and_hashes_is_rejected(change: dict[str, object]) -> None:
    bad = msgspec.structs.replace(command(2), **change)
    with pytest.raises(InvalidRequest):
        sequence_of(bad, BLOCK_SIZE)


def test_pin_larger_than_the_pool_is_rejected() -> None:
    pinned = Pinned()
    with pytest.raises(ContextFull, match="do not fit"):
        pinned.pin(command(17))


def test_pin_does_not_lift_the_tenants_quota() -> None:
    pinned = Pinned()
    bounded = new_sequence(prompt(9, start=700), greedy(1))
    bounded.kv_quota_tokens = 3 * BLOCK_SIZE
    pinned.rig.complete(bounded)
    pinned.pin(command(2))
    pinned.run()
    pool = pinned.rig.engine.pool
    assert pool.quota_tokens_of("tenant-a") == 3 * BLOCK_SIZE
    assert pool.num_blocks_of("tenant-a") == 3
    assert pinned.pin(command(2)).num_cached_blocks == 2  # the unpinned blocks were evicted


def test_tenant_over_quota_loses_pinned_blocks_last() -> None:
    pinned = Pinned()
    pinned.pin(command(2))
    pinned.run()
    for start in (700, 800):  # a block each; the second is one too many
        other = new_sequence(prompt(5, start=start), greedy(1))
        other.kv_quota_tokens = 3 * BLOCK_SIZE
        pinned.rig.complete(other)
    assert pinned.rig.engine.pool.num_blocks_of("tenant-a") == 3
    assert pinned.pin(command(2)).num_cached_blocks == 2
