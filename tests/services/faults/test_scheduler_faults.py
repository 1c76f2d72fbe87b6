"""Whatever work on one request, host or worker raises ends that item, and the scheduler goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest.mock import patch

import pytest

from shared.messages import Placed
from tests.services.faults.test_item_faults import ERRORS
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.residency.test_waking import host_of
from tests.services.scheduler.rig import Rig, eventually
from tests.services.scheduler.test_service import scenario


def faulty(test: Callable[[Rig], Awaitable[None]]) -> None:
    """Fails if an exception would have ended the process."""
    reported: list[object] = []

    async def watched(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reported.append(context))
        await test(rig)

    scenario(watched)
    assert reported == []


@pytest.mark.parametrize("error", ERRORS)
def test_wake_that_raises_is_tried_again(error: BaseException) -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig)
        keeper = rig.service._residency
        with patch.object(keeper, "_wake", side_effect=error) as wake:
            await rig.submit(submit_of("r0", model="a"))
            await eventually(lambda: wake.call_count > 1)
        assert isinstance(await rig.result(), Placed)
        assert (host.woken, keeper._acting) == (["a"], {})

    faulty(test)


@pytest.mark.parametrize("error", ERRORS)
def test_park_that_raises_is_tried_again(error: BaseException) -> None:
    async def test(rig: Rig) -> None:
        host = await host_of(rig)
        await host.make_hot("b")
        keeper = rig.service._residency
        with patch.object(keeper, "_park", side_effect=error) as park:
            await rig.submit(submit_of("r0", model="a"))
            await eventually(lambda: park.call_count > 1)
        assert isinstance(await rig.result(), Placed)
        assert (host.parked, host.woken) == (["b"], ["a"])

    faulty(test)


@pytest.mark.parametrize("error", ERRORS)
def test_late_start_that_raises_fails_its_request_alone(error: BaseException) -> None:
    async def test(rig: Rig) -> None:
        delay_s = 1.0  # longer than a first reply is waited for
        worker = await rig.worker("decode-0", delay_s=delay_s)
        with patch.object(rig.service, "_started", side_effect=error) as started:
            await rig.submit(submit_of("r0"))
            await eventually(lambda: started.call_count > 0)
            assert not isinstance(await rig.result(), Placed)
            worker.delay_s = 0.0
            await asyncio.sleep(2 * delay_s)  # the replies to later tries come late, too
        await rig.submit(submit_of("r1"))
        assert isinstance(await rig.result(num=2), Placed)

    faulty(test)


@pytest.mark.parametrize("error", ERRORS)
def test_compiler_that_raises_costs_speed_alone(error: BaseException) -> None:
    async def test(rig: Rig) -> None:
        async def compile_loops() -> None:
            raise error

        rig.service._on_first_worker = compile_loops
        await rig.worker("decode-0")
        await rig.submit(submit_of("r0"))
        assert isinstance(await rig.result(), Placed)

    faulty(test)


ROUNDS: dict[str, tuple[Callable[[Rig], object], str]] = {
    "unserved requests": (lambda rig: rig.service._unserved, "retry"),
    "residency": (lambda rig: rig.service._residency, "decide"),
    "roles": (lambda rig: rig.service._role_changes, "decide"),
    "keepalives": (lambda rig: rig.service, "_send"),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_loop_goes_on_after_a_round_that_raises(name: str) -> None:
    async def test(rig: Rig) -> None:
        owner_of, method = ROUNDS[name]
        waiting = {"gateway-0": ["r0"]}
        queues = rig.service._queues
        with (
            patch.object(queues, "request_ids_by_gateway", return_value=waiting),
            patch.object(owner_of(rig), method, side_effect=RuntimeError("a bug")) as broken,
        ):
            await eventually(lambda: broken.call_count > 2)
        await rig.worker("decode-0")
        await rig.submit(submit_of("r0"))
        assert isinstance(await rig.result(), Placed)

    faulty(test)
