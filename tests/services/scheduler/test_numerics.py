"""Where a request with output goes if workers compute different bits."""

from __future__ import annotations

import msgspec

from services.scheduler.decode_starts import SILENT_GRACE_S
from shared.messages import Placed
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import NUMERICS, Rig
from tests.services.scheduler.test_service import NO_ROOM, scenario

OTHER = msgspec.structs.replace(NUMERICS, device="sm90")


async def placed_on(rig: Rig, *, num: int) -> str:
    placed = await rig.result(num=num, within_s=1.0)
    assert isinstance(placed, Placed)
    return placed.worker_id


def test_resumed_requests_go_to_equal_numerics() -> None:
    async def test(rig: Rig) -> None:
        for number in range(4):
            await rig.worker(f"decode-{number}", numerics=OTHER if number == 3 else NUMERICS)
        for number in range(8):
            await rig.submit(submit_of(f"r{number}", numerics=OTHER))
            assert await placed_on(rig, num=number + 1) == "decode-3"

    scenario(test)


def test_resumed_request_waits_for_room_on_equal_numerics_and_delays_no_other() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", numerics=OTHER)
        full = await rig.worker("decode-1", num_free_blocks=NO_ROOM)
        await rig.submit(submit_of("resumed", numerics=NUMERICS))
        await rig.submit(submit_of("new"))
        assert await placed_on(rig, num=1) == "decode-0"
        full.num_free_blocks = 100
        assert await placed_on(rig, num=2) == "decode-1"
        assert [each.request.request_id for each in full.started] == ["resumed"]

    scenario(test)


def test_resumed_request_goes_to_other_numerics_if_no_equal_worker_can_take_it() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", region="eu")
        await rig.worker("decode-1", region="us", numerics=OTHER)
        excluding = submit_of("r0", numerics=NUMERICS, excluded_workers=("decode-0",))
        await rig.submit(excluding)
        assert await placed_on(rig, num=1) == "decode-1"
        await rig.submit(submit_of("r1", numerics=NUMERICS, allowed_regions=("us",)))
        assert await placed_on(rig, num=2) == "decode-1"

    scenario(test, region="us")


def test_resumed_request_goes_to_other_numerics_if_no_equal_context_holds_it() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", max_context_tokens=25)
        await rig.worker("decode-1", numerics=OTHER)
        await rig.submit(submit_of("r0", num_prompt_tokens=20, max_tokens=10, numerics=NUMERICS))
        assert await placed_on(rig, num=1) == "decode-1"

    scenario(test)


def test_resumed_request_goes_to_other_numerics_if_the_equal_worker_is_silent() -> None:
    async def test(rig: Rig) -> None:
        silent = await rig.worker("decode-0", delay_s=60.0)
        await rig.worker("decode-1", numerics=OTHER)
        await rig.submit(submit_of("r0", numerics=NUMERICS))
        placed = await rig.result(within_s=SILENT_GRACE_S + 1.0)
        assert isinstance(placed, Placed) and placed.worker_id == "decode-1"
        assert silent.started, "it was tried first"

    scenario(test)


def test_decode_computes_the_prompt_if_all_prefill_workers_are_unlike() -> None:
    async def test(rig: Rig) -> None:
        decode = await rig.worker("decode-0")
        await rig.worker("prefill-0", "prefill", numerics=OTHER)
        await rig.submit(submit_of("r0", num_prompt_tokens=2000))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.has_unlike_prefill
        assert decode.started[0].prefill_candidates == ()
        await rig.worker("prefill-1", "prefill")
        await rig.submit(submit_of("r1", num_prompt_tokens=2000))
        placed = await rig.result(num=2)
        assert isinstance(placed, Placed) and not placed.has_unlike_prefill
        assert decode.started[1].prefill_candidates == ("prefill-1",)

    scenario(test)


def test_short_prompt_is_not_counted_as_computed_for_want_of_like_prefill_workers() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        await rig.worker("prefill-0", "prefill", numerics=OTHER)
        await rig.submit(submit_of("r0", num_prompt_tokens=3))
        placed = await rig.result()
        assert isinstance(placed, Placed) and not placed.has_unlike_prefill

    scenario(test)
