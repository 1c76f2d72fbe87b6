"""KV of several groups of layers goes from a prefill to a decode engine, and no byte more."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.executors.timing_executor import STATE_BYTES
from shared.engine.kv.kv_sender import KvSender, PushCounts
from shared.engine.kv.kv_writer import KvWriter
from shared.errors import FrameRefused
from shared.kv_layout import Chunk, Reach, Window
from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY, Fill, FrameHeader
from tests.support.engine.rig import BLOCK_SIZE, Rig, new_sequence, prompt, seeded, solo
from tests.support.records import PlannedLink, frame_header
from tests.support.world.clock import VirtualClock

FULL_AND_WINDOW: tuple[Reach, ...] = (None, Window(9))
FOUR: tuple[Reach, ...] = (Window(5), None, Window(16), Window(30))


class DirectLink(PlannedLink):
    frame_bytes = FRAME_BYTES
    frames_under_way = FRAMES_UNDER_WAY

    def __init__(self, writer: KvWriter, *, fails_at: int | None = None) -> None:
        self.writer = writer
        self.headers: list[FrameHeader] = []
        self._fails_at = fails_at

    async def send(
        self, header: FrameHeader, fill: Fill, tenant_id: str = "", *, is_private: bool = False
    ) -> None:
        if len(self.headers) == self._fails_at:
            raise FrameRefused("the link says no")
        self.headers.append(header)
        payload = memoryview(bytearray(header.payload_bytes))
        await fill(payload)
        await self.writer.frame(header, payload)

    async def close(self) -> None:
        pass


async def push(
    source: Rig, target: Rig, sequence: Sequence, *, fails_at: int | None = None
) -> tuple[DirectLink, KvWriter]:
    """Computes and pushes, step by step, what the reserved `sequence` of `target` lacks."""
    first = sequence.num_computed_tokens
    writer = KvWriter(sequence, target.executor, num_held_tokens=first)
    link = DirectLink(writer, fails_at=fails_at)
    prefill = source.add(new_sequence(sequence.token_ids[: sequence.num_prefill_tokens], None))

    async def dial() -> DirectLink:
        return link

    sender = KvSender(
        b"p" * 16,
        prefill,
        first_token=first,
        memory=source.executor,
        dial=dial,
        clock=VirtualClock(),
        counts=PushCounts(),
    )
    running = asyncio.create_task(sender.run())
    while prefill.state is not SequenceState.HELD:
        source.step()
        sender.computed(prefill.num_computed_tokens)
        await asyncio.sleep(0)
    try:
        await running
    except FrameRefused:
        assert fails_at is not None
    source.engine.release(prefill)
    return link, writer


def sent_tokens(reach: Reach, num_tokens: int, first: int) -> int:
    """By the definition: what the token after the last full block sees, in full blocks."""
    position = num_tokens // BLOCK_SIZE * BLOCK_SIZE
    match reach:
        case None:
            start = 0
        case Window(tokens=tokens):
            start = max(0, position - tokens + 1)
        case Chunk(tokens=tokens):
            start = position - position % tokens
    return num_tokens - max(first, start // BLOCK_SIZE * BLOCK_SIZE)


@pytest.mark.parametrize("reaches", [(None,), (Window(9),), FULL_AND_WINDOW, FOUR])
@pytest.mark.parametrize("num_tokens", [2, 8, 9, 41, 100, 101])
@pytest.mark.parametrize("num_known", [0, 8, 40])
def test_pushed_sequence_continues_like_a_local_one(
    reaches: tuple[Reach, ...], num_tokens: int, num_known: int
) -> None:
    """`num_known` tokens are cached by both engines already."""
    ids = prompt(num_tokens)
    source, target = (Rig(reaches=reaches, max_batch_tokens=16) for _ in range(2))
    for rig in (source, target):
        if num_known:
            rig.complete(new_sequence([*ids[:num_known], 7], seeded(1)))
    sequence = new_sequence(ids, seeded(30))
    assert target.reserve(sequence)
    first = sequence.num_computed_tokens
    assert first <= min(num_known, num_tokens - 1)
    link, writer = asyncio.run(push(source, target, sequence))
    assert writer.is_complete
    expected = sum(sent_tokens(reach, num_tokens - 1, first) for reach in reaches)
    assert sum(header.payload_bytes for header in link.headers) == expected * STATE_BYTES
    target.engine.activate(sequence, writer.num_held_tokens)
    target.run()
    assert target.output(sequence) == solo(tuple(ids), seeded(30))


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_sequence_that_is_pushed_in_part_is_computed_locally(fails_at: int) -> None:
    ids = prompt(60)
    source, target = (Rig(reaches=FULL_AND_WINDOW, max_batch_tokens=16) for _ in range(2))
    sequence = new_sequence(ids, seeded(30))
    assert target.reserve(sequence)
    _, writer = asyncio.run(push(source, target, sequence, fails_at=fails_at))
    assert not writer.is_complete
    num_held = writer.num_held_tokens // BLOCK_SIZE * BLOCK_SIZE
    target.engine.activate(sequence, num_held)
    target.run()
    assert target.output(sequence) == solo(tuple(ids), seeded(30))


def test_pushed_prefix_is_found_by_the_next_request() -> None:
    """Only the last partial block is computed again."""
    ids = prompt(101)
    source, target = (Rig(reaches=FULL_AND_WINDOW, max_batch_tokens=16) for _ in range(2))
    sequence = new_sequence(ids, seeded(1))
    assert target.reserve(sequence)
    _, writer = asyncio.run(push(source, target, sequence))
    target.engine.activate(sequence, writer.num_held_tokens)
    target.run()
    again = new_sequence([*ids[:100], 9], seeded(3))
    target.complete(again)
    assert again.num_cached_tokens == 100


@pytest.mark.parametrize("group", [2, -1])
def test_frame_of_an_unknown_group_is_refused(group: int) -> None:
    async def main() -> None:
        target = Rig(reaches=FULL_AND_WINDOW)
        sequence = new_sequence(prompt(20), seeded(1))
        assert target.reserve(sequence)
        writer = KvWriter(sequence, target.executor, num_held_tokens=0)
        header = frame_header(
            4 * STATE_BYTES,
            num_tokens=4,
            kv_format=target.executor.kv_layout.key,
            group=group,
            numerics=target.executor.numerics,
        )
        with pytest.raises(FrameRefused, match=f"group {group} is not one of 2"):
            await writer.frame(header, memoryview(bytes(header.payload_bytes)))

    asyncio.run(main())
