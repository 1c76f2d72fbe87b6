"""Workers check again that they have what a request needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from shared.engine.features import FEATURES
from shared.errors import WorkerUnfit
from shared.messages import PrefillAccepted
from shared.subjects import run_prefill
from tests.services.decode.test_handoff import PROMPT, Cluster, run_prefill_of
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import Peer, SimulatedWorker, request_of

DEMO = ("demo/1",)
NEEDING = msgspec.structs.replace(request_of(PROMPT), needs=DEMO)


class MixedCluster(Cluster):
    """`features`: by worker; the others have none."""

    def __init__(self, **features: tuple[str, ...]) -> None:
        self.network, plane = SimulatedNetwork(), DataPlane()
        self.peer = Peer(self.network)

        def worker(worker_id: str, role: str) -> SimulatedWorker:
            own = features.get(worker_id.replace("-", "_"), ())
            return SimulatedWorker(self.network, plane, worker_id, (role,), features=own)

        self.prefills = [worker(f"prefill-{number}", "prefill") for number in (1, 2)]
        self.decode = worker("decode-1", "decode")
        self.workers = [*self.prefills, self.decode]


@asynccontextmanager
async def mixed(**features: tuple[str, ...]) -> AsyncIterator[MixedCluster]:
    made = MixedCluster(**features)
    for each in (made.peer, *made.workers):
        await each.start()
    await asyncio.sleep(2)  # virtual: heartbeats have arrived
    try:
        yield made
        await made.settled()
    finally:
        for each in (*made.workers, made.peer):
            await each.stop()


def play(test: Callable[[MixedCluster], Awaitable[None]], **features: tuple[str, ...]) -> None:
    async def main() -> None:
        async with mixed(**features) as it:
            await test(it)

    run(main())


@pytest.mark.parametrize("features", [(), ("demo/2", "demo"), ("demo/10",)])
def test_decode_refuses_what_it_lacks_and_serves_the_rest(features: tuple[str, ...]) -> None:
    """WorkerUnfit lets a scheduler try another worker, and send other requests here at once."""

    async def test(it: MixedCluster) -> None:
        with pytest.raises(WorkerUnfit, match="decode-1 does not have demo/1"):
            await it.peer.place("decode-1", NEEDING)
        assert it.decode.is_empty
        assert (await it.run(request_of(PROMPT))).finish.reason == "length"

    play(test, decode_1=features)


def test_needed_features_may_be_some_of_the_workers() -> None:
    async def test(it: MixedCluster) -> None:
        received = await it.run(NEEDING)
        assert received.finish.reason == "length"
        assert received.finish.served.prefill_worker_id == "prefill-1"

    both = ("other/3", *DEMO)
    play(test, decode_1=both, prefill_1=both)


def test_prefill_worker_without_a_needed_feature_computes_nothing() -> None:
    """The next candidate does, or decode itself."""

    async def test(it: MixedCluster) -> None:
        received = await it.run(NEEDING, ("prefill-1", "prefill-2"))
        assert received.finish.served.prefill_worker_id == "prefill-2"
        other = msgspec.structs.replace(request_of(PROMPT, tenant_id="b"), needs=DEMO)
        received = await it.run(other, ("prefill-1",))
        assert received.finish.served.prefill_worker_id is None
        assert it.prefills[0].engine.num_computed_prompt_tokens == 0

    play(test, decode_1=DEMO, prefill_2=DEMO)


def test_prefill_refuses_what_it_lacks() -> None:
    async def test(it: MixedCluster) -> None:
        command = msgspec.structs.replace(run_prefill_of(it), needs=DEMO)
        with pytest.raises(WorkerUnfit, match="prefill-1 does not have demo/1"):
            await it.decode.bus.request(
                run_prefill("prefill-1"), command, PrefillAccepted, timeout_s=1
            )

    play(test)


def test_heartbeats_announce_the_features() -> None:
    async def test(it: MixedCluster) -> None:
        fleet = it.peer.health_monitor.fleet
        cards = [fleet.heartbeat_of(each.worker_id).model for each in it.workers]
        assert [card.features for card in cards] == [(), DEMO, DEMO]

    play(test, decode_1=DEMO, prefill_2=DEMO)


def test_features_of_this_code_are_versioned_names() -> None:
    assert all(name.partition("/")[2].isdecimal() for name in FEATURES)
    assert len(set(FEATURES)) == len(FEATURES) <= 64
