"""The scheduler and hosts: requests of models that are not hot wait while these are woken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler.residency.keeper import ResidencyKeeper
from services.scheduler.residency.wake_orders import PATIENCE, SLACK_S
from services.scheduler.waiting_for_host import NO_WORKER_GRACE_S
from shared.errors import NoCapacity
from shared.messages import ModelState, Placed, PlacementFailed, WakeModel
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.residency.host_peer import HostPeer
from tests.services.scheduler.rig import Rig, eventually
from tests.services.scheduler.test_service import now, scenario


async def host_of(rig: Rig, host_id: str = "host-0", **options: object) -> HostPeer:
    models: dict[str, ModelState] = {"a": "standby", "b": "standby"}
    return await HostPeer(rig, host_id, **({"models": models} | options)).join()  # type: ignore[arg-type]


def refuse(message: str, retry_after_s: float | None) -> object:
    def on_wake(wake: WakeModel) -> None:
        raise NoCapacity(message, retry_after_s=retry_after_s)

    return on_wake


def failure_of(result: object) -> tuple[str, float | None]:
    assert isinstance(result, PlacementFailed)
    return result.failure.code, result.failure.retry_after_s


def test_request_of_a_model_in_standby_waits_until_it_is_woken() -> None:
    async def test(rig: Rig) -> None:
        host, began = await host_of(rig), now()
        await rig.submit(submit_of("r0", model="a"))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id == "host-0-a"
        assert now() - began < host.wake_s + 0.05
        assert host.woken == ["a"]

    scenario(test)


def test_a_burst_of_requests_is_not_read_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 requests of a model in standby took seconds of the scheduler."""
    num_decided, decide = 0, ResidencyKeeper.decide

    def counted(keeper: ResidencyKeeper, *arguments: Any) -> None:
        nonlocal num_decided
        num_decided += 1
        decide(keeper, *arguments)

    async def test(rig: Rig) -> None:
        host = await host_of(rig)
        monkeypatch.setattr(ResidencyKeeper, "decide", counted)
        for number in range(50):
            await rig.submit(submit_of(f"r{number}", model="a"))
        await eventually(lambda: host.woken == ["a"])
        assert num_decided <= 2  # at once for the first, and perhaps with a tick
        assert isinstance(await rig.result(num=50), Placed)

    scenario(test)


def test_it_waits_longer_than_for_a_worker_that_nobody_can_start() -> None:
    async def test(rig: Rig) -> None:
        await host_of(rig, models={"a": "cold"}, start_s=3 * NO_WORKER_GRACE_S)
        await rig.submit(submit_of("r0", model="a"))
        await rig.submit(submit_of("r1", model="unknown"))
        assert failure_of(await rig.result())[0] == "no_capacity"
        assert rig.results()[0].request_id == "r1"
        assert isinstance(await rig.result(num=2), Placed)

    scenario(test)


def test_failed_model_is_refused_with_the_reason_for_clients() -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig, models={"a": "failed"})
        host.hosted["a"] = replace(
            host.hosted["a"], failure="'/x' is missing", public_failure="its source is missing"
        )
        await host.health_monitor.transition_to("ready")  # sends it
        await rig.submit(submit_of("r0", model="a"))
        result = await rig.result()
        assert isinstance(result, PlacementFailed)
        message = "the model 'a' cannot be served: its source is missing"
        assert result.failure.message == message

    scenario(test)


def test_requests_of_other_models_do_not_wait_behind_it() -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig, num_hot=2, never_ends=True)
        await host.make_hot("b")
        for number in range(40):  # more than are placed at once
            await rig.submit(submit_of(f"a{number}", model="a"))
        began = now()
        await rig.submit(submit_of("b0", model="b"))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.request_id == "b0"
        assert now() - began < 0.05

    scenario(test)


def test_idle_model_is_parked_first_where_memory_is_short() -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig)
        await host.make_hot("b")
        await asyncio.sleep(0.3)
        await rig.submit(submit_of("r0", model="a"))
        assert isinstance(await rig.result(), Placed)
        assert (host.parked, host.woken) == (["b"], ["a"])

    scenario(test)


def test_wake_that_ends_after_the_deadline_fails_the_request_with_a_time() -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig, models={"a": "cold"}, start_s=5.0)
        await rig.submit(submit_of("patient", model="a"))
        await eventually(lambda: host.woken == ["a"])
        await asyncio.sleep(1.0)
        await rig.submit(submit_of("r0", model="a", deadline_s=3.0))
        code, retry_after_s = failure_of(await rig.result(within_s=0.2))
        assert code == "no_capacity" and retry_after_s == pytest.approx(4.0, abs=0.2)
        assert isinstance(await rig.result(num=2), Placed)

    scenario(test)


def test_host_that_refuses_is_followed_by_the_next_one() -> None:
    async def test(rig: Rig) -> None:
        await host_of(rig, on_wake=refuse("no memory", 9.0))
        other = await host_of(rig, "host-1", models={"a": "cold"})
        await rig.submit(submit_of("r0", model="a"))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id == "host-1-a"
        assert other.woken == ["a"]

    scenario(test)


def test_client_is_told_if_all_hosts_refuse() -> None:
    async def test(rig: Rig) -> None:
        await host_of(rig, on_wake=refuse("no memory for a", 9.0))
        await host_of(rig, "host-1", on_wake=refuse("no memory at all", 12.0))
        await rig.submit(submit_of("r0", model="a", deadline_s=5.0))
        result = await rig.result(within_s=0.5)
        code, retry_after_s = failure_of(result)
        assert code == "no_capacity" and retry_after_s == pytest.approx(9.0, abs=0.3)
        assert isinstance(result, PlacementFailed) and result.failure.message == "no memory for a"

    scenario(test)


def test_refusal_with_a_time_before_the_deadline_is_asked_again_then() -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig, on_wake=refuse("not now", 1.0))
        await rig.submit(submit_of("r0", model="a", deadline_s=5.0))
        await asyncio.sleep(0.5)
        host.on_wake = lambda message: None
        began = now()
        assert isinstance(await rig.result(), Placed)
        assert 0.5 < now() - began < 1.0

    scenario(test)


def test_host_that_dies_while_waking_is_followed_by_another_one() -> None:
    async def test(rig: Rig) -> None:
        dying = await host_of(rig, models={"a": "standby"}, never_ends=True)
        other = await host_of(rig, "host-1", models={"a": "cold"})
        await rig.submit(submit_of("r0", model="a"))
        await eventually(lambda: dying.woken == ["a"])
        rig.network.disconnect("host-0")
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id == "host-1-a"
        assert other.woken == ["a"]

    scenario(test)


def test_requests_wait_for_a_lost_host_to_return() -> None:
    async def test(rig: Rig) -> None:
        dying = await host_of(rig, models={"a": "standby"}, never_ends=True)
        await rig.submit(submit_of("r0", model="a"))
        await eventually(lambda: dying.woken == ["a"])
        await dying.health_monitor.stop()
        rig.network.disconnect("host-0")
        await asyncio.sleep(2 * NO_WORKER_GRACE_S)
        assert rig.results() == []
        await host_of(rig, "host-0.b", models={"a": "cold"})
        assert isinstance(await rig.result(), Placed)

    scenario(test)


def test_wake_that_never_ends_is_tried_elsewhere() -> None:
    async def test(rig: Rig) -> None:
        stuck = await host_of(rig, models={"a": "standby"}, never_ends=True)
        other = await host_of(rig, "host-1", models={"a": "cold"})
        began = now()
        await rig.submit(submit_of("r0", model="a"))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id == "host-1-a"
        assert now() - began < PATIENCE * stuck.wake_s + SLACK_S + other.start_s + 0.5

    scenario(test)


def test_wake_that_never_ends_is_asked_for_again_without_another_host() -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig, models={"a": "standby"}, never_ends=True)
        await rig.submit(submit_of("r0", model="a"))
        await eventually(lambda: host.woken == ["a"])
        host.never_ends = False
        assert isinstance(await rig.result(), Placed)
        assert host.woken == ["a", "a"]

    scenario(test)


def test_model_is_woken_in_an_allowed_region() -> None:
    async def test(rig: Rig) -> None:
        near = await host_of(rig, region="near")
        far = await host_of(rig, "host-1", models={"a": "cold"}, region="far")
        await near.make_hot("a")
        await rig.submit(submit_of("r0", model="a", allowed_regions=("far",)))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id == "host-1-a"
        assert (near.woken, far.woken) == ([], ["a"])

    scenario(test, region="far")


def test_request_that_must_not_wait_has_the_model_woken_for_later_ones() -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig)
        await rig.submit(submit_of("r0", model="a", is_queueable=False))
        code, retry_after_s = failure_of(await rig.result(within_s=0.2))
        assert code == "no_capacity" and retry_after_s is not None
        await asyncio.sleep(retry_after_s)
        assert host.woken == ["a"]
        await rig.submit(submit_of("r1", model="a", is_queueable=False))
        assert isinstance(await rig.result(num=2), Placed)

    scenario(test)


def test_silent_host_is_avoided_for_a_while() -> None:
    async def test(rig: Rig) -> None:
        silent = await host_of(rig, models={"a": "standby"})
        await host_of(rig, "host-1", models={"a": "cold"})
        rig.network.fate = lambda subject, sender, receiver: (
            () if "models" in subject and receiver == "host-0" else (0.0,)
        )
        await rig.submit(submit_of("r0", model="a"))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id == "host-1-a"
        assert silent.woken == []

    scenario(test)
