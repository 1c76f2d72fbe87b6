"""The push of a prefill's KV, against links that fail."""

from __future__ import annotations

import asyncio
import gc

from services.prefill.kv_sender import KvSender, PushCounts
from shared.engine.batching.sequence import Sequence
from shared.engine.runners.timing_runner import TimingRunner
from shared.errors import LinkLost
from shared.kv_wire.link import FrameHeader
from tests.simulation.world.clock import VirtualClock, run

BLOCK_SIZE = 16


class BreakingLink:
    """Takes frames until it is told to break; then all that are under way fail in one turn."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.is_broken = asyncio.Event()

    async def send(self, header: FrameHeader, fill: object) -> None:
        await self.is_broken.wait()
        self.num_failed += 1
        raise LinkLost(f"frame {header.sequence_number}")


def _push_over(link: BreakingLink) -> KvSender:
    async def dial() -> BreakingLink:
        return link

    sequence = Sequence(
        sequence_id=b"s",
        tenant_id="t",
        cache_root=b"",
        token_ids=list(range(3 * BLOCK_SIZE)),
        num_prompt_tokens=3 * BLOCK_SIZE,
        block_table=[0, 1, 2],
    )
    runner = TimingRunner(VirtualClock(), num_blocks=4, block_size=BLOCK_SIZE)
    return KvSender(
        b"p",
        sequence,
        first_token=0,
        runner=runner,
        dial=dial,  # type: ignore[arg-type]
        clock=VirtualClock(),
        counts=PushCounts(),
    )


async def _two_frames_fail(link: BreakingLink) -> str:
    """Returns what the push raised."""
    push = _push_over(link)

    async def compute() -> None:
        for num_chunks in (1, 2):
            push.computed(num_chunks * BLOCK_SIZE)
            await asyncio.sleep(0.1)
        link.is_broken.set()
        push.computed(3 * BLOCK_SIZE)

    computing, raised = asyncio.ensure_future(compute()), ""
    try:
        await push.run()
    except LinkLost as error:
        raised = error.message
    await computing
    return raised


def test_what_every_frame_of_a_broken_link_raised_is_taken_and_the_first_told() -> None:
    """asyncio reports an exception that nobody took when its task goes."""

    async def scenario() -> list[object]:
        unhandled: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, each: unhandled.append(each))
        link = BreakingLink()
        assert await _two_frames_fail(link) == "frame 0"
        gc.collect()
        assert link.num_failed == 2
        return unhandled

    assert run(scenario()) == []
