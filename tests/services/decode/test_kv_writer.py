from __future__ import annotations

import asyncio
from array import array

import msgspec
import pytest

from shared.engine.batching.sequence import Sequence
from shared.engine.executors.timing_executor import STATE_BYTES, TimingExecutor
from shared.engine.kv.kv_writer import KvWriter
from shared.engine.step import KvRun
from shared.errors import FrameRefused, OutOfMemory
from shared.kv_wire.expected_pushes import ExpectedPushes
from shared.kv_wire.link import FrameHeader
from tests.support.records import frame_header
from tests.support.world.clock import VirtualClock, run


class SlowExecutor(TimingExecutor):
    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        await asyncio.sleep(0.1)  # virtual
        await super().write_kv(run, payload)


def writer_of(executor: TimingExecutor) -> tuple[KvWriter, FrameHeader]:
    """A writer of a prompt of 33 tokens, and the header of its first frame of 16."""
    sequence = Sequence(
        sequence_id=b"p" * 16,
        tenant_id="t",
        cache_root=b"r" * 16,
        token_ids=list(range(33)),
        num_prompt_tokens=33,
        block_tables=[array("q", [0, 1, 2])],
        first_blocks=[0],
    )
    header = frame_header(
        16 * STATE_BYTES,
        num_tokens=16,
        kv_format=executor.kv_layout.key,
        numerics=executor.numerics,
    )
    return KvWriter(sequence, executor, num_held_tokens=0), header


def test_concurrent_duplicate_frame_is_counted_once() -> None:
    async def main() -> None:
        kv_writer, header = writer_of(SlowExecutor(VirtualClock(), num_blocks=3))
        payload = memoryview(bytes(header.payload_bytes))
        writes = [kv_writer.frame(header, payload) for _ in range(2)]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(each) for each in results] == [type(None), FrameRefused]
        assert kv_writer.num_held_tokens == 16
        assert not kv_writer.is_complete

    run(main())


class FailingExecutor(TimingExecutor):
    """Fails to write the first frame, once the second one is written."""

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        if run.first_token == 0:
            await asyncio.sleep(0.1)  # virtual
            raise OutOfMemory("no memory for the copy")
        await super().write_kv(run, payload)


def test_tokens_after_those_that_could_not_be_written_are_not_held() -> None:
    """The next prefill continues the tokens that are held, and the blocks are found by others."""

    async def main() -> None:
        kv_writer, header = writer_of(FailingExecutor(VirtualClock(), num_blocks=3))
        later = msgspec.structs.replace(header, first_token=16, sequence_number=1)
        payload = memoryview(bytes(header.payload_bytes))
        first = asyncio.ensure_future(kv_writer.frame(header, payload))
        await asyncio.sleep(0)
        await kv_writer.frame(later, payload)
        assert kv_writer.num_held_tokens == 0
        with pytest.raises(OutOfMemory):
            await first
        assert kv_writer.num_held_tokens == 0
        last = msgspec.structs.replace(later, first_token=32, num_tokens=1)
        last = msgspec.structs.replace(last, payload_bytes=STATE_BYTES)
        await kv_writer.frame(last, payload[:STATE_BYTES])
        assert kv_writer.num_held_tokens == 0 and not kv_writer.is_complete

    run(main())


def test_frame_of_unlike_numerics_is_refused() -> None:
    """A sender is not trusted to have compared them."""

    async def main() -> None:
        executor = TimingExecutor(VirtualClock(), num_blocks=3)
        kv_writer, header = writer_of(executor)
        unlike = msgspec.structs.replace(executor.numerics, device="sm90")
        sent = msgspec.structs.replace(header, numerics=unlike)
        with pytest.raises(FrameRefused, match="sm90"):
            await kv_writer.frame(sent, memoryview(bytes(header.payload_bytes)))
        assert kv_writer.num_held_tokens == 0

    run(main())


def test_rejected_format_is_counted_apart() -> None:
    async def main() -> None:
        executor = TimingExecutor(VirtualClock(), num_blocks=3)
        kv_writer, header = writer_of(executor)
        pushes = ExpectedPushes()
        pushes.expect(header.placement_id, kv_writer)
        payload = memoryview(bytes(header.payload_bytes))

        async def take_copy() -> tuple[memoryview, int | None]:
            return payload, header.checksum

        for changed in ({"kv_format": "other"}, {"first_token": 1}):
            sent = msgspec.structs.replace(header, **changed)
            assert await pushes.deliver(sent, take_copy) is not None
        assert (pushes.counts.num_rejected, pushes.counts.num_mismatched) == (2, 1)

    run(main())
