"""A handoff between workers that compute different bits."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shared.clock import Clock
from shared.messages import Served, WorkerLoad
from shared.numerics import Mode
from tests.services.decode.test_handoff import PROMPT
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import (
    CopyingExecutor,
    Peer,
    Received,
    SimulatedWorker,
    request_of,
)


def received_from(mode: Mode, *, prefill_variant: int) -> Received:
    return run_with(mode, prefill_variant=prefill_variant)[0]


class Fp8Executor(CopyingExecutor):
    """Its KV is in another dtype, and the layout of what it reads and writes is the same."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(clock, **options)
        self.numerics = msgspec.structs.replace(self.numerics, kv_dtype="float8_e4m3fn")


def run_with(
    mode: Mode, *, prefill_variant: int, prefill_executor: type[CopyingExecutor] = CopyingExecutor
) -> tuple[Received, list[WorkerLoad]]:
    """And the loads of both workers afterwards."""

    async def main() -> tuple[Received, list[WorkerLoad]]:
        network, plane = SimulatedNetwork(), DataPlane()
        workers = [
            SimulatedWorker(
                network,
                plane,
                "prefill-1",
                ("prefill",),
                mode=mode,
                variant=prefill_variant,
                executor_type=prefill_executor,
            ),
            SimulatedWorker(network, plane, "decode-1", ("decode",), mode=mode),
        ]
        peer = Peer(network)
        for each in (peer, *workers):
            await each.start()
        await asyncio.sleep(2)  # virtual: heartbeats have arrived
        placement_id = await peer.place("decode-1", request_of(PROMPT), ("prefill-1",))
        received = await peer.finished(placement_id)
        loads = [each.worker.health_monitor.describe().load for each in workers]
        for each in (*workers, peer):
            await each.stop()
        return received, [each for each in loads if each is not None]

    return run(main())


def served_of(received: Received) -> Served:
    assert received.finish is not None and received.finish.reason == "length"
    assert len(received.output) == 20
    return received.finish.served


def test_exact_decode_computes_the_prompt_that_an_unlike_worker_was_asked_for() -> None:
    like = received_from("exact", prefill_variant=0)
    assert served_of(like).num_pushed_tokens == len(PROMPT) - 1
    unlike = received_from("exact", prefill_variant=1)
    assert served_of(unlike).num_pushed_tokens == 0
    assert unlike.output == like.output


def test_fast_decode_uses_kv_of_unlike_hardware() -> None:
    assert served_of(received_from("fast", prefill_variant=1)).num_pushed_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_decode_takes_no_kv_of_a_worker_that_stores_another_dtype(mode: Mode) -> None:
    received, loads = run_with(mode, prefill_variant=0, prefill_executor=Fp8Executor)
    assert served_of(received).num_pushed_tokens == 0
    assert received.output == received_from(mode, prefill_variant=0).output
    assert loads[0].num_kv_mismatches == 1


def test_served_names_the_numerics_of_the_decode_worker() -> None:
    served = served_of(received_from("fast", prefill_variant=1))
    assert served.numerics is not None
    assert (served.numerics.mode, served.numerics.device) == ("fast", "timing")


def test_rejected_kv_is_counted_by_both_workers() -> None:
    for variant, count in ((0, 0), (1, 1)):
        _, (prefill, decode) = run_with("exact", prefill_variant=variant)
        assert (prefill.num_kv_mismatches, decode.num_failed_handoffs) == (count, count)
