"""`hearth drain` of workers on a real NATS server, while they stream."""

from __future__ import annotations

import asyncio

import pytest

from services.cli.deployment import drain as drain_module
from services.cli.deployment.drain import DrainOptions, drain
from shared.clock import MonotonicClock
from shared.errors import ConfigError, WorkerBusy
from shared.messages import ChangeRoles, Done
from shared.subjects import lifecycle
from tests.services.worker.test_role_changes import (
    BOTH,
    DEADLINE_S,
    NUM_STREAMS,
    NUM_TOKENS,
    Rig,
    rig,
)
from tests.support.waiting import until

__all__ = ["rig"]  # a fixture
LONG_TOKENS = 200  # steps of 10 ms: `hearth drain` finds its worker within 0.3 s


async def drained(rig: Rig, target: str, **options: object) -> tuple[bool, list[str]]:
    given = {"hand_over_s": 60.0, "timeout_s": DEADLINE_S, "is_undone": False, "is_forced": False}
    lines: list[str] = []
    done = await drain(
        rig.buses["operator-1"],
        MonotonicClock(),
        DrainOptions(target=target, **(given | options)),  # type: ignore[arg-type]
        lines.append,
    )
    return done, lines


async def streams_on_a_draining_worker(
    rig: Rig, **options: object
) -> tuple[list[bytes], asyncio.Task[tuple[bool, list[str]]]]:
    await rig.start("worker-1", BOTH, "decode")
    await rig.start("worker-2", BOTH)
    streams = [await rig.place("worker-1", n, num_tokens=LONG_TOKENS) for n in range(NUM_STREAMS)]
    await rig.until_tokens(3)
    draining = asyncio.create_task(drained(rig, "worker-1", **options))
    monitor = rig.processes["worker-1"]._worker.health_monitor
    await until(lambda: monitor.state == "draining")
    return streams, draining


async def acknowledge(rig: Rig, streams: list[bytes]) -> None:
    for placement_id in streams:
        await rig.acknowledge("worker-1", placement_id)


async def test_drained_worker_ends_its_streams_and_takes_no_more(rig: Rig) -> None:
    streams, draining = await streams_on_a_draining_worker(rig)
    with pytest.raises(WorkerBusy):
        await rig.place("worker-1", 100)
    await until(lambda: len(rig.finishes) == NUM_STREAMS)
    assert {rig.finishes[each].reason for each in streams} == {"length"}
    await acknowledge(rig, streams)
    done, lines = await draining
    assert done
    assert lines[0] == f"worker-1: {NUM_STREAMS} requests run, 0 prompts are pushed"
    assert lines[-1] == "worker-1: safe to stop"


async def test_streams_are_handed_over_at_once_and_nothing_is_left(rig: Rig) -> None:
    streams, draining = await streams_on_a_draining_worker(rig, hand_over_s=0.0)
    await until(lambda: len(rig.finishes) == NUM_STREAMS)
    failures = [rig.finishes[each].failure for each in streams]
    assert {each and each.code for each in failures} == {WorkerBusy.code}  # gateways retry it
    assert all(len(rig.outputs[each]) < LONG_TOKENS for each in streams)
    await acknowledge(rig, streams)
    assert (await draining)[0]
    engine = rig.processes["worker-1"]._worker.loop.engine
    await until(lambda: engine.is_idle)
    assert engine.num_generated_tokens < NUM_STREAMS * LONG_TOKENS


async def test_undone_drain_serves_again(rig: Rig) -> None:
    await rig.start("worker-1", BOTH, "decode")
    await rig.start("worker-2", BOTH)
    assert await drained(rig, "worker-1") == (True, ["worker-1: safe to stop"])
    change = ChangeRoles(roles=("prefill",))
    with pytest.raises(WorkerBusy, match="is draining"):
        await rig.buses["operator-1"].request(
            lifecycle("decode", "worker-1"), change, Done, timeout_s=DEADLINE_S
        )
    assert await drained(rig, "worker-1", is_undone=True) == (True, ["worker-1: serves again"])
    await rig.place("worker-1", 1)
    await rig.until_tokens(NUM_TOKENS)


async def test_last_worker_and_unknown_names_are_refused(rig: Rig) -> None:
    await rig.start("worker-1", BOTH)
    with pytest.raises(ConfigError, match="worker-1 is the last worker that decodes timing"):
        await drained(rig, "worker-1")
    with pytest.raises(ConfigError, match=r"no worker and no machine 'nobody', of .*worker-1"):
        await drained(rig, "nobody")
    assert (await drained(rig, "worker-1", is_forced=True))[0]


async def test_machine_is_drained_with_all_its_workers(rig: Rig) -> None:
    await rig.start("worker-1", BOTH)
    await rig.start("worker-2", BOTH)
    machine = rig.processes["worker-1"]._worker.health_monitor.describe().host_name
    done, lines = await drained(rig, machine, is_forced=True)
    assert done
    assert sorted(lines) == ["worker-1: safe to stop", "worker-2: safe to stop"]


async def test_worker_that_does_not_answer_holds_up_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start("worker-1", BOTH)
    await rig.start("worker-2", BOTH)
    stuck = asyncio.Event()
    monitor = rig.processes["worker-2"]._worker.health_monitor
    monkeypatch.setattr(monitor, "transition_to", lambda _: stuck.wait())
    monkeypatch.setattr(drain_module, "REPLY_TIMEOUT_S", 1.0)
    machine = monitor.describe().host_name
    done, lines = await drained(rig, machine, is_forced=True, timeout_s=0.0)
    assert not done
    assert sorted(lines) == ["worker-1: safe to stop", "worker-2: does not answer"]


async def test_time_that_is_over_is_told(rig: Rig) -> None:
    await rig.start("worker-1", BOTH, "decode")
    await rig.start("worker-2", BOTH)
    await rig.place("worker-1", 1)
    assert not (await drained(rig, "worker-1", timeout_s=0.0))[0]
