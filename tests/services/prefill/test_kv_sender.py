"""Pushes KV of a prefill over a link that fails."""

from __future__ import annotations

import asyncio
import gc
from array import array

import pytest

from shared.engine.batching.sequence import Sequence
from shared.engine.executors.timing_executor import TimingExecutor
from shared.engine.kv.kv_sender import KvSender, PushCounts
from shared.errors import LinkLost, OutsideRegions
from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY, FrameHeader, PushBounds
from tests.support.records import PlannedLink
from tests.support.waiting import LIMIT_S
from tests.support.world.clock import VirtualClock, run

BLOCK_SIZE = 16


class FailingLink(PlannedLink):
    """Accepts frames until `is_lost` is set; then all frames in flight fail in one loop turn."""

    def __init__(
        self, frame_bytes: int = FRAME_BYTES, frames_under_way: int = FRAMES_UNDER_WAY
    ) -> None:
        self.frame_bytes, self.frames_under_way = frame_bytes, frames_under_way
        self.num_failed = 0
        self.is_lost = asyncio.Event()

    regions = "fr", "de"

    async def offer(self, placement_id: bytes) -> None:
        self.offered = placement_id

    async def send(
        self, header: FrameHeader, fill: object, tenant_id: str, *, is_private: bool
    ) -> None:
        await self.is_lost.wait()
        self.num_failed += 1
        raise LinkLost(f"frame {header.sequence_number}")


class SlowLink(PlannedLink):
    """Takes a second for each frame."""

    frame_bytes, frames_under_way = FRAME_BYTES, FRAMES_UNDER_WAY

    async def send(
        self, header: FrameHeader, fill: object, tenant_id: str, *, is_private: bool
    ) -> None:
        await asyncio.sleep(1.0)


def _sender_over(link: FailingLink | SlowLink, bounds: PushBounds | None = None) -> KvSender:
    async def dial() -> FailingLink | SlowLink:
        return link

    sequence = Sequence(
        sequence_id=b"s",
        tenant_id="t",
        cache_root=b"",
        token_ids=list(range(3 * BLOCK_SIZE)),
        num_prompt_tokens=3 * BLOCK_SIZE,
        block_tables=[array("q", [0, 1, 2])],
        first_blocks=[0],
    )
    executor = TimingExecutor(VirtualClock(), num_blocks=4, block_size=BLOCK_SIZE)
    return KvSender(
        b"p",
        sequence,
        first_token=0,
        memory=executor,
        dial=dial,  # type: ignore[arg-type]
        clock=VirtualClock(),
        counts=PushCounts(),
        bounds=bounds,
    )


async def _two_frames_fail(link: FailingLink) -> str:
    """Returns the message of the error that the sender raises."""
    sender = _sender_over(link)

    async def compute() -> None:
        for num_chunks in (1, 2):
            sender.computed(num_chunks * BLOCK_SIZE)
            await asyncio.sleep(0.1)
        link.is_lost.set()
        sender.computed(3 * BLOCK_SIZE)

    computing, raised = asyncio.ensure_future(compute()), ""
    try:
        await sender.run()
    except LinkLost as error:
        raised = error.message
    await computing
    return raised


@pytest.mark.parametrize(
    ("regions", "peer_region"), [({"fr"}, "de"), ({"de"}, "de"), ({"fr", "de", "us"}, "us")]
)
async def test_nothing_is_sent_outside_of_the_regions(regions: set[str], peer_region: str) -> None:
    """Neither is an offer sent, nor KV read."""
    sender = _sender_over(link := FailingLink(), PushBounds(frozenset(regions), peer_region))
    sender.computed(BLOCK_SIZE)
    with pytest.raises(OutsideRegions, match="from 'fr' to 'de'"):
        await sender.run()
    assert not hasattr(link, "offered")
    assert link.num_failed == 0


async def test_a_push_with_bounds_is_offered_first() -> None:
    sender = _sender_over(link := FailingLink(), PushBounds(frozenset({"fr", "de"}), "de"))
    link.is_lost.set()
    sender.computed(3 * BLOCK_SIZE)
    with pytest.raises(LinkLost):
        await sender.run()
    assert link.offered == b"p"


async def test_cancelled_push_does_not_wait_for_a_receiver_that_hangs() -> None:
    class Silent(FailingLink):
        async def offer(self, placement_id: bytes) -> None:
            await self.is_lost.wait()

    sender = _sender_over(Silent(), PushBounds(frozenset({"fr", "de"}), "de"))
    sender.computed(3 * BLOCK_SIZE)
    running = asyncio.ensure_future(sender.run())
    await asyncio.sleep(0)
    sender.cancel()
    assert await asyncio.wait_for(running, LIMIT_S) is False


@pytest.mark.parametrize(
    ("frame_tokens", "under_way", "sizes"), [(20, 1, [20, 20, 8]), (12, 3, [12] * 4), (99, 2, [48])]
)
def test_frames_are_those_that_the_link_recommends(
    frame_tokens: int, under_way: int, sizes: list[int]
) -> None:
    found: list[int] = []
    num_under_way: list[int] = [0]

    class Accepting(FailingLink):
        async def send(
            self, header: FrameHeader, fill: object, tenant_id: str, *, is_private: bool
        ) -> None:
            found.append(header.num_tokens)
            num_under_way.append(num_under_way[-1] + 1)
            await asyncio.sleep(0.1)
            num_under_way.append(num_under_way[-1] - 1)

    layout = TimingExecutor(VirtualClock(), num_blocks=1).kv_layout
    link = Accepting(frame_tokens * layout.bytes_per_token, under_way)
    sender = _sender_over(link)
    sender.computed(3 * BLOCK_SIZE)
    assert run(sender.run())
    assert (found, max(num_under_way)) == (sizes, min(under_way, len(sizes)))


def test_first_frame_error_is_raised_and_all_are_retrieved() -> None:
    """asyncio reports an exception that was not retrieved when its task is deleted."""

    async def scenario() -> list[object]:
        unhandled: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, each: unhandled.append(each))
        link = FailingLink()
        assert await _two_frames_fail(link) == "frame 0"
        gc.collect()
        assert link.num_failed == 2
        return unhandled

    assert run(scenario()) == []


def test_time_of_the_link_is_that_with_a_frame_under_way() -> None:
    """Not the time in which the prompt is computed."""

    async def main() -> None:
        sender = _sender_over(SlowLink())
        sender.computed(BLOCK_SIZE)
        asyncio.get_running_loop().call_later(5.0, sender.computed, 3 * BLOCK_SIZE)
        assert await sender.run()
        assert asyncio.get_running_loop().time() == pytest.approx(6.0)
        assert sender.link_s == pytest.approx(2.0)
        assert sender.num_bytes == 3 * BLOCK_SIZE * 16

    run(main())
