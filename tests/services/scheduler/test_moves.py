"""Requests that another worker is asked to take, as theirs has no room for them."""

from __future__ import annotations

import msgspec

from shared.errors import Overloaded
from shared.messages import DecodeStarted, Placed, PlacementFailed, StartDecode, SubmitRequest
from shared.numerics import Numerics
from shared.transport.bus import error_of
from tests.services.scheduler.literals import BLOCK_SIZE, submit_of
from tests.services.scheduler.rig import NUMERICS, Rig, eventually
from tests.services.scheduler.sites.test_other_sites import Peer
from tests.services.scheduler.sites.test_other_sites import scenario as scenario_of_sites
from tests.services.scheduler.test_service import scenario

NUM_TOKENS = 20 + 1000  # of a prompt, and of its longest answer
NUM_BLOCKS = -(-NUM_TOKENS // BLOCK_SIZE)


def move(request_id: str, *workers: str, num_prompt_tokens: int = 20) -> SubmitRequest:
    submit = submit_of(
        request_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=1000,
        excluded_workers=workers,
        is_queueable=False,
    )
    return msgspec.structs.replace(submit, is_move=True)


async def failure_of(rig: Rig, num: int = 1) -> Exception:
    failed = await rig.result(num=num, within_s=1.0)
    assert isinstance(failed, PlacementFailed)
    return error_of(failed.failure)


def test_move_goes_to_a_worker_with_room_for_its_answer() -> None:
    """Both workers have room for the prompt."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-1")
        await rig.worker("decode-2", num_free_blocks=NUM_BLOCKS - 1)
        await rig.worker("decode-3", num_free_blocks=NUM_BLOCKS)
        await rig.submit(move("r1", "decode-1"))
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id == "decode-3"

    scenario(test)


def test_move_changes_no_numerics() -> None:
    """A loss may, where no other worker is left."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-1")
        await rig.worker("decode-2", numerics=Numerics("exact", "other", "uint8", "1"))
        asked = move("r1", "decode-1")
        begun = msgspec.structs.replace(asked.request, numerics=NUMERICS)
        await rig.submit(msgspec.structs.replace(asked, request=begun))
        assert isinstance(await failure_of(rig), Overloaded)
        lost = msgspec.structs.replace(asked, request=begun, is_move=False)
        await rig.submit(lost)
        assert isinstance(await rig.result(num=2), Placed)

    scenario(test)


def test_room_is_given_to_one_move() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-2", num_free_blocks=2 * NUM_BLOCKS - 1)
        worker.delay_s = 0.01
        for number in range(2):
            await rig.submit(move(f"r{number}", "decode-1"))
        found = {type(await rig.result(num=number)) for number in (1, 2)}
        assert found == {Placed, PlacementFailed}

    scenario(test)


def test_move_without_room_is_rejected_at_once_and_blocks_nobody() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-1")
        await rig.worker("decode-2", num_free_blocks=NUM_BLOCKS - 1)
        await rig.submit(move("r1", "decode-1"))
        assert isinstance(await failure_of(rig), Overloaded)
        await rig.submit(submit_of("r2"))
        placed = await rig.result(num=2, within_s=0.05)
        assert isinstance(placed, Placed)

    scenario(test)


def test_move_of_the_only_worker_is_rejected_at_once() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-1")
        await rig.submit(move("r1", "decode-1"))
        await failure_of(rig)

    scenario(test)


def test_move_leaves_home_at_once_and_may_wait_at_the_other_site() -> None:
    """Its worker here keeps its place in the order, wherever it waits besides."""

    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        starts: list[StartDecode] = []

        def reply(start: StartDecode) -> DecodeStarted:
            starts.append(start)
            return DecodeStarted(placement_id=start.placement_id, num_cached_tokens=0)

        await rig.worker("decode-1", reply=reply)
        await rig.submit(move("r1", "decode-1"))
        placed = await rig.result(within_s=0.2)
        assert isinstance(placed, Placed) and placed.worker_id.startswith("near/")
        await eventually(lambda: len(near.started) == 1)
        assert near.started[0].is_queueable and not starts

    scenario_of_sites(test)
