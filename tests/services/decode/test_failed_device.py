"""Workers whose device fails: they report it and leave the fleet."""

from __future__ import annotations

from typing import Any

from shared.errors import DeviceFailed, StepFailed
from tests.services.decode.test_handoff import PROMPT, Cluster, cluster, outputs_of
from tests.support.world.clock import run
from tests.support.world.workers import SimulatedWorker, request_of

POISON = 999


def make_sick(worker: SimulatedWorker) -> None:
    worker.executor.step_raises, worker.executor.check_raises = lambda: True, True


def is_known(it: Cluster, worker: SimulatedWorker) -> bool:
    return it.peer.health_monitor.fleet.heartbeat_of(worker.worker_id) is not None


def test_decode_worker_leaves_the_fleet() -> None:
    """Requests of the failed step are handed back; a farewell makes gateways move the others."""

    async def main() -> None:
        async with cluster() as it:
            make_sick(it.decode)
            requests = [request_of([n, *PROMPT[:20]]) for n in range(5)]
            placed = [await it.peer.place("decode-1", each) for each in requests]
            received = await it.peer.finished(placed[0])
            assert received.finish.failure.code == DeviceFailed.code
            await it.decode.process.gone()
            assert it.decode.process.is_dead
            assert not is_known(it, it.decode)  # a lost worker would stay known

    run(main())


def test_decode_computes_the_prompt_of_a_sick_prefill_worker() -> None:
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main() -> None:
        async with cluster() as it:
            sick = it.prefills[0]
            make_sick(sick)
            received = await it.run(request_of(PROMPT))
            assert received.output == expected
            assert received.finish.served.prefill_worker_id is None
            await sick.process.gone()
            assert not is_known(it, sick)
            it.workers.remove(sick)
            await it.settled()

    run(main())


def test_poisonous_prompt_fails_alone() -> None:
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main() -> None:
        async with cluster() as it:
            it.decode.executor.poison = frozenset({POISON})
            good = await it.peer.place("decode-1", request_of(PROMPT))
            bad = await it.peer.place("decode-1", request_of([POISON, *PROMPT[:20]]))
            failure: Any = (await it.peer.finished(bad)).finish.failure
            assert failure.code == StepFailed.code
            assert (await it.peer.finished(good)).output == expected
            await it.settled()
            assert is_known(it, it.decode)

    run(main())
