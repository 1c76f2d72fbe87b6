"""Pinned prefixes on real workers (their engine times instead of computing), over virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from services.kv_index.pins import PIN_LEASE_S, Pins, expected_pin
from shared.block_hash import PUBLIC_TENANT_ID, public_root, root_hash
from shared.messages import (
    KeepPins,
    MatchPrefix,
    ModelCard,
    PinPrefix,
    PinsKept,
    PrefixMatches,
    Role,
)
from shared.packing import pack_token_ids, unpack_hashes
from shared.subjects import MATCH
from shared.tenancy import pinned_prefix
from shared.tenancy.pinned_prefix import PinnedPrefix
from tests.services.kv_index.rig import Rig, eventually
from tests.simulation.world.clock import run
from tests.simulation.world.kv_link import DataPlane
from tests.simulation.world.workers import BLOCK_SIZE, MODEL, REVISION, SimulatedWorker

NUM_BLOCKS = 4
CARD = ModelCard(
    name=MODEL,
    revision=REVISION,
    kv_format="k",
    block_size=BLOCK_SIZE,
    max_context_tokens=4096,
    vocab_size=1000,
)


def a_prefix(name: str = "house-rules", *, start: int = 3, **fields: object) -> PinnedPrefix:
    token_ids = range(start, start + NUM_BLOCKS * BLOCK_SIZE + 5)
    given = {"tenant_id": "t", "created_at": 900, **fields}
    return PinnedPrefix(
        name=name,
        model=MODEL,
        messages=[{"role": "system", "content": "Be kind."}],
        token_ids=pack_token_ids(token_ids),
        **given,  # type: ignore[arg-type]
    )


def tip_of(prefix: PinnedPrefix) -> bytes:
    pin = expected_pin(prefix, CARD)
    assert pin is not None
    return pin.tip_hash


class PinRig(Rig):
    def __init__(self) -> None:
        super().__init__()
        self.plane = DataPlane()

    async def engine(
        self, worker_id: str, role: Role = "prefill", *, region: str = ""
    ) -> SimulatedWorker:
        worker = SimulatedWorker(self.network, self.plane, worker_id, (role,), num_blocks=64)
        worker.worker.health_monitor._region = region
        await worker.start()
        return worker

    async def save(self, prefix: PinnedPrefix) -> None:
        await pinned_prefix.save(self.store, prefix, 1_000.0)

    async def warm(self, prefix: PinnedPrefix, *workers: SimulatedWorker) -> None:
        for worker in workers:
            await eventually(lambda worker=worker: is_warm(worker, prefix))


def is_warm(worker: SimulatedWorker, prefix: PinnedPrefix) -> bool:
    pin = expected_pin(prefix, CARD)
    assert pin is not None
    hashes = unpack_hashes(pin.command.block_hashes)
    pool = worker.engine.pool
    return len(pool.match(hashes)) == len(hashes) == NUM_BLOCKS and is_pinned(worker, prefix)


def is_pinned(worker: SimulatedWorker, prefix: PinnedPrefix) -> bool:
    return tip_of(prefix) in worker.engine.pool._pins


def scenario(test: Callable[[PinRig], Awaitable[None]]) -> None:
    async def play() -> None:
        rig = PinRig()
        await rig.service.start()
        await asyncio.sleep(1.5)  # the watcher hears itself
        await test(rig)
        await rig.service.stop()

    run(play())


def test_every_worker_of_the_model_gets_it_and_keeps_it() -> None:
    async def test(rig: PinRig) -> None:
        workers = [await rig.engine("prefill-0"), await rig.engine("decode-0", "decode")]
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, *workers)
        await asyncio.sleep(3 * PIN_LEASE_S)
        await rig.warm(prefix, *workers)
        assert all(each.is_empty for each in workers)
        record = rig.store.data[f"hearth:t:prefix:{tip_of(prefix).hex()}"]
        assert (record[b"pin"], record[b"num_tokens"]) == (b"house-rules", b"64")
        assert (record[b"holder:prefill-0"], record[b"holder:decode-0"]) == (b"1", b"1")

    scenario(test)


def test_a_worker_that_comes_later_gets_it_too() -> None:
    async def test(rig: PinRig) -> None:
        prefixes = [a_prefix("a"), a_prefix("b", start=200), a_prefix("c", start=400)]
        for prefix in prefixes:
            await rig.save(prefix)
        await asyncio.sleep(2)
        worker = await rig.engine("prefill-0")
        for prefix in prefixes:
            await rig.warm(prefix, worker)

    scenario(test)


def test_a_new_worker_is_given_one_to_compute_each_round() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        told: list[float] = []
        pin = worker.worker._pins.pin

        def noted(command: PinPrefix, sequence: object) -> object:
            told.append(asyncio.get_running_loop().time())
            return pin(command, sequence)  # type: ignore[arg-type]

        worker.worker._pins.pin = noted  # type: ignore[method-assign, assignment]
        for number in range(3):
            await rig.save(a_prefix(f"p{number}", start=3 + 200 * number))
        await asyncio.sleep(8)
        assert len(told) == 3
        assert told[1] - told[0] > 0.9 and told[2] - told[1] > 0.9

    scenario(test)


def test_what_is_deleted_is_let_go() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await pinned_prefix.delete(rig.store, "t", prefix.name)
        await asyncio.sleep(2.5)
        assert not is_pinned(worker, prefix)
        record = rig.store.data[f"hearth:t:prefix:{tip_of(prefix).hex()}"]
        assert record[b"pin"] == b""

    scenario(test)


def test_one_with_an_end_ends() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = a_prefix(expires_at=1_001)
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        rig.service._keeper._wall_clock = lambda: 1_001.0
        await asyncio.sleep(2.5)
        assert not is_pinned(worker, prefix)
        assert await pinned_prefix.entries(rig.store, "t") == {}

    scenario(test)


def test_it_goes_only_where_its_tenant_may() -> None:
    async def test(rig: PinRig) -> None:
        here = await rig.engine("prefill-0", region="eu")
        there = await rig.engine("prefill-1", region="us")
        prefix = a_prefix(allowed_regions=("eu",))
        await rig.save(prefix)
        await rig.warm(prefix, here)
        await asyncio.sleep(3)
        assert not is_pinned(there, prefix)

    scenario(test)


def test_a_public_one_is_nobodys_in_particular() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = a_prefix(tenant_id=PUBLIC_TENANT_ID)
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        owners = {block.tenant_id for block in worker.engine.pool.cached_blocks()}
        assert owners == {PUBLIC_TENANT_ID}
        assert expected_pin(prefix, CARD).command.cache_root == public_root(prefix.name, REVISION)  # type: ignore[union-attr]

    scenario(test)


def test_pins_stay_while_redis_is_away() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        rig.store.is_away = True
        await asyncio.sleep(3 * PIN_LEASE_S)
        assert is_warm(worker, prefix)

    scenario(test)


def test_an_index_that_has_not_read_them_tells_no_worker_to_let_go() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        rig.store.is_away = True
        rig.service = rig.replica("kv_index-0")
        await rig.service.start()
        await asyncio.sleep(0.8 * PIN_LEASE_S)
        assert is_pinned(worker, prefix)
        rig.store.is_away = False
        await asyncio.sleep(2 * PIN_LEASE_S)
        assert is_warm(worker, prefix)

    scenario(test)


def test_one_replica_tells_the_workers_and_the_other_takes_over() -> None:
    async def test(rig: PinRig) -> None:
        second = rig.replica("kv_index-1")
        await second.start()
        worker = await rig.engine("prefill-0")
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await asyncio.sleep(2)
        assert (rig.service._keeper._pinned_workers, second._keeper._pinned_workers) == (
            {"prefill-0"},
            set(),
        )
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        await asyncio.sleep(2 * PIN_LEASE_S)
        assert is_warm(worker, prefix)
        rig.service = second

    scenario(test)


def test_a_restarted_worker_is_warmed_again() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await worker.kill()
        again = await rig.engine("prefill-0")
        await rig.warm(prefix, again)

    scenario(test)


def test_workers_hear_nothing_where_nothing_is_pinned() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        pins, received = worker.worker._pins, list[KeepPins]()
        renew = pins.renew

        def recorded(command: KeepPins) -> PinsKept:
            received.append(command)
            return renew(command)

        pins.renew = recorded  # type: ignore[method-assign]
        await asyncio.sleep(5)
        assert received == []
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await asyncio.sleep(5)
        assert received

    scenario(test)


def test_hits_and_saved_tokens_are_counted_beyond_a_restart() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = a_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await asyncio.sleep(0.5)
        hashes = expected_pin(prefix, CARD).command.block_hashes  # type: ignore[union-attr]
        await _ask(rig, hashes)
        await rig.service.drain()
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        rig.service = rig.replica("kv_index-0")
        await rig.service.start()
        await asyncio.sleep(3)
        await _ask(rig, hashes)
        await asyncio.sleep(0.5)
        record = rig.store.data[f"hearth:t:prefix:{tip_of(prefix).hex()}"]
        assert (record[b"hits"], record[b"saved_tokens"]) == (b"2", b"128")

    scenario(test)


async def _ask(rig: PinRig, block_hashes: bytes) -> None:
    question = MatchPrefix(
        tenant_id="t", model=MODEL, revision=REVISION, block_hashes=block_hashes + bytes(16)
    )
    reply = await rig.asker.request(MATCH, question, PrefixMatches, timeout_s=1.0)
    assert [each.num_blocks for each in reply.matches] == [NUM_BLOCKS]


@pytest.mark.parametrize(
    ("prefix", "card"),
    [
        (a_prefix(), msgspec.structs.replace(CARD, name="other")),
        (a_prefix(), msgspec.structs.replace(CARD, max_context_tokens=64)),
        (a_prefix(), msgspec.structs.replace(CARD, block_size=128)),
        (msgspec.structs.replace(a_prefix(), token_ids=b""), CARD),
    ],
)
def test_what_a_worker_cannot_hold_it_is_not_asked_to(
    prefix: PinnedPrefix, card: ModelCard
) -> None:
    pins = Pins()
    pins.add(prefix)
    assert pins.expected_of(card, "") == {}


def test_a_salt_has_a_root_of_its_own() -> None:
    salted = expected_pin(a_prefix(cache_salt="s"), CARD)
    assert salted is not None
    assert salted.command.cache_root == root_hash("t", REVISION, cache_salt="s")
