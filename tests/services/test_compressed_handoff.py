"""Hands off KV of a real model, compressed on slow links; the tokens equal a local run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from shared.engine.batching.sequence import Sequence
from shared.engine.kv.kv_sender import KvSender, PushCounts
from shared.engine.kv.kv_writer import KvWriter
from shared.kv_wire.compression_gate import NUM_NEEDED, NUM_PAIRS
from shared.kv_wire.link import PushLink
from shared.messages import DataPlaneAddress, SamplingParams
from tests.shared.kv_wire.support import DEADLINE_S, eventually
from tests.shared.kv_wire.throttled import ThrottledPair, throttled_pair
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import new_sequence
from tests.support.threads import computing_threads

DEMO_MODEL = Path("shared/demo_model")
CHUNK = 22  # tokens; a frame of this size is worth compressing
NUM_CHUNKS = 42
PROMPT = [(7 * n + n * n) % 2000 + 6 for n in range(NUM_CHUNKS * CHUNK + 1)]
GREEDY = SamplingParams(seed=1, max_tokens=12, temperature=0.0)
SLOW, FAST = 50e6, 10e9  # bytes/s
PLACEMENT = b"p" * 16


@dataclass
class WorkerPair:
    prefill: Worker
    decode: Worker


@pytest.fixture(scope="module")
def expected() -> list[int]:
    async def main() -> list[int]:
        async with worker_pair() as both:
            return await both.decode.run(new_sequence(PROMPT, GREEDY))

    return asyncio.run(main())


@asynccontextmanager
async def worker_pair() -> AsyncIterator[WorkerPair]:
    with computing_threads(1):
        both = WorkerPair(*(Worker(DEMO_MODEL, "bfloat16", budget=512) for _ in range(2)))
        yield both
        await asyncio.gather(both.prefill.executor.close(), both.decode.executor.close())


async def hand_off(both: WorkerPair, pair: ThrottledPair, address: DataPlaneAddress) -> Sequence:
    """Pushes chunk by chunk, like the prefill service. Returns decode's sequence, ready to run."""
    source, target = new_sequence(PROMPT[:-1], None), new_sequence(PROMPT, GREEDY)
    await both.prefill.run(source)
    assert both.decode.engine.reserve(target)
    kv_writer = KvWriter(target, both.decode.executor, num_held_tokens=0)
    pair.server.expect(PLACEMENT, kv_writer)
    link = await pair.dialer.link(address)

    async def dial() -> PushLink:
        return link

    sender = KvSender(
        PLACEMENT,
        source,
        first_token=0,
        memory=both.prefill.executor,
        dial=dial,
        clock=pair.clock,
        counts=PushCounts(),
    )
    running = asyncio.ensure_future(sender.run())
    async with asyncio.timeout(DEADLINE_S):
        for num_tokens in range(CHUNK, len(PROMPT), CHUNK):
            sender.computed(num_tokens)
            await eventually(
                lambda: kv_writer.num_held_tokens == num_tokens and link.num_unacked == 0  # noqa: B023
            )
        assert await running
    both.decode.engine.activate(target, kv_writer.num_held_tokens)
    return target


@pytest.mark.parametrize(
    ("transport", "bandwidth", "is_compressed"),
    [("tcp", SLOW, True), ("tcp", FAST, False), ("memfd", SLOW, False)],
)
async def test_handoff_gives_the_same_tokens(
    expected: list[int], transport: str, bandwidth: float, is_compressed: bool
) -> None:
    async with worker_pair() as both, throttled_pair(bandwidth) as pair:
        shared_memory = msgspec.structs.replace(pair.server.address, port=1)
        target = await hand_off(both, pair, pair.address if transport == "tcp" else shared_memory)
        await both.decode.run_on()
        assert both.decode.tokens[target.sequence_id] == expected
        num_coded = (NUM_PAIRS + 1) // 2 + NUM_CHUNKS - (NUM_NEEDED + NUM_PAIRS + 1)
        compressed = pair.dialer.compressed
        assert compressed.num_frames == (num_coded if is_compressed else 0)
        frame_bytes = CHUNK * both.prefill.executor.kv_layout.bytes_per_token
        assert (compressed.num_saved_bytes > 0.25 * num_coded * frame_bytes) is is_compressed
