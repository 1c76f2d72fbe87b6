"""Pushes KV of a prefill over a link that fails."""

from __future__ import annotations

import asyncio
import gc
from array import array

from shared.engine.batching.sequence import Sequence
from shared.engine.executors.timing_executor import TimingExecutor
from shared.engine.kv.kv_sender import KvSender, PushCounts
from shared.errors import LinkLost
from shared.kv_wire.link import FRAME_BYTES, FrameHeader
from tests.support.world.clock import VirtualClock, run

BLOCK_SIZE = 16


class FailingLink:
    """Accepts frames until `is_lost` is set; then all frames in flight fail in one loop turn."""

    def __init__(self, frame_bytes: int = FRAME_BYTES) -> None:
        self.frame_bytes = frame_bytes
        self.num_failed = 0
        self.is_lost = asyncio.Event()

    async def send(self, header: FrameHeader, fill: object, tenant_id: str) -> None:
        await self.is_lost.wait()
        self.num_failed += 1
        raise LinkLost(f"frame {header.sequence_number}")


def _sender_over(link: FailingLink) -> KvSender:
    async def dial() -> FailingLink:
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


def test_frames_have_the_size_that_the_link_recommends() -> None:
    class Accepting(FailingLink):
        async def send(self, header: FrameHeader, fill: object, tenant_id: str) -> None:
            sizes.append(header.num_tokens)

    async def scenario(num_tokens: int) -> None:
        layout = TimingExecutor(VirtualClock(), num_blocks=1).kv_layout
        sender = _sender_over(Accepting(num_tokens * layout.bytes_per_token))
        sender.computed(3 * BLOCK_SIZE)
        await sender.run()

    for num_tokens, expected in ((20, [20, 20, 8]), (100, [48])):
        sizes: list[int] = []
        run(scenario(num_tokens))
        assert sizes == expected


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
