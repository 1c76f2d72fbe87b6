"""KV crosses between workers that are cut differently: each byte once to each holder."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from shared.engine.executors.group.kv.leader_sequence import LeaderSequence
from shared.engine.executors.group.kv.rank_memory import CopyThread, RankKvMemory
from shared.engine.kv.joined_push import JoinedPush
from shared.engine.kv.kv_copies import KvCopies
from shared.engine.kv.kv_writer import KvWriter
from shared.engine.kv.local_ports import LocalPushPort
from shared.engine.parallel.rank_layout import rank_layout
from shared.engine.parallel.rank_part import RankPart
from shared.engine.step import KvRun
from shared.kv_layout import KvLayout, KvShard, first_sent
from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY, CompressionCounts, Fill, FrameHeader
from shared.kv_wire.shards import in_group, sent_shards
from shared.messages import DataPlaneAddress, KvTarget, LinkKey
from shared.numerics import Numerics
from tests.shared.kv_wire.test_shards import layout_of, shards_of
from tests.support.records import PlannedLink
from tests.support.world.clock import VirtualClock

BLOCK_SIZE, NUM_BLOCKS = 16, 8
SOURCE_TABLES, TARGET_TABLES = [[5, 0, 3], [1, 7, 6]], [[2, 6, 1], [4, 0, 3]]
NUMERICS = Numerics("exact", "cpu", "uint8", "1")
sizes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3]))


def whole_cache(layout: KvLayout, seed: int | None) -> torch.Tensor:
    """Random bytes, or zeros without a seed."""
    planes, heads, dim = layout.state.row
    shape = (layout.num_slots, planes, NUM_BLOCKS, heads, BLOCK_SIZE, dim)
    if seed is None:
        return torch.zeros(shape, dtype=torch.uint8)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=_generator(seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def memory_of(layout: KvLayout, shard: KvShard, whole: torch.Tensor) -> RankKvMemory:
    """A rank's part of the cache `whole`, with slots of its own."""
    nothing = range(0)
    local = rank_layout(layout, RankPart(shard.layers, nothing, shard.heads, nothing, nothing))
    cache = torch.zeros((local.num_slots, *whole.shape[1:]), dtype=torch.uint8)
    cache = cache[:, :, :, shard.first_head : shard.heads.stop].contiguous()
    for group in range(len(layout.groups)):
        held = in_group(layout, group, shard)
        part = whole[held.first_layer : held.layers.stop, :, :, shard.first_head : shard.heads.stop]
        table = SOURCE_TABLES[group]  # no block of another group
        cache[: held.num_layers, :, table] = part[:, :, table]
    return RankKvMemory(CopyThread(KvCopies(cache, local), NUMERICS), layout, shard)


@dataclass
class Link(PlannedLink):
    """Delivers at once."""

    writer: KvWriter
    sent: Counter[bytes]
    name: bytes
    frame_bytes: int = FRAME_BYTES
    frames_under_way: int = FRAMES_UNDER_WAY

    async def send(
        self, header: FrameHeader, fill: Fill, tenant_id: str = "", *, is_private: bool = False
    ) -> None:
        payload = memoryview(bytearray(header.payload_bytes))
        await fill(payload)
        await self.writer.frame(header, payload)
        self.sent[self.name] += header.payload_bytes

    async def close(self) -> None:
        pass


class Dialer:
    """A KvDialer to writers by instance id."""

    def __init__(self, writers: dict[bytes, KvWriter]) -> None:
        self.compressed = CompressionCounts()
        self.plans = []
        self.sent: Counter[bytes] = Counter()
        self._writers = writers

    async def link(self, target: DataPlaneAddress, link_key: LinkKey | None = None) -> Link:
        return Link(self._writers[target.instance_id], self.sent, target.instance_id)

    async def close(self) -> None:
        pass


async def cross(
    layout: KvLayout, held: list[KvShard], wanted: list[KvShard], chunks: list[int]
) -> None:
    num_tokens, num_groups = sum(chunks), len(layout.groups)
    whole = whole_cache(layout, seed=1)
    sources = [memory_of(layout, shard, whole) for shard in held]
    targets = [memory_of(layout, shard, whole_cache(layout, None)) for shard in wanted]
    names = [bytes([rank]) for rank in range(len(wanted))]
    reserved = LeaderSequence(num_tokens, block_tables=TARGET_TABLES[:num_groups])
    writers = {
        name: KvWriter(reserved, memory, num_held_tokens=0, shard=memory.shard)
        for name, memory in zip(names, targets, strict=True)
    }
    dialers = [Dialer(writers) for _ in sources]
    addresses = tuple(
        KvTarget(
            shard=shard,
            address=DataPlaneAddress(host="h", port=1, unix_path="", instance_id=name),
        )
        for name, shard in zip(names, wanted, strict=True)
    )
    pushes = [
        LocalPushPort(dialer, memory, VirtualClock(), shard).start(
            b"p" * 16,
            LeaderSequence(num_tokens, block_tables=SOURCE_TABLES[:num_groups]),
            first_token=0,
            targets=addresses,
            link_key=None,
        )
        for dialer, memory, shard in zip(dialers, sources, sent_shards(held), strict=True)
    ]
    joined = JoinedPush(pushes)
    running = asyncio.create_task(joined.run())
    num_computed = 0
    for chunk in chunks:
        num_computed += chunk
        joined.computed(num_computed)
        await asyncio.sleep(0)
    assert await running
    for name, memory in zip(names, targets, strict=True):
        assert writers[name].is_complete
        expected_bytes = 0
        for group, reach in enumerate(layout.reaches):
            first = first_sent(reach, num_tokens, layout.hash_tokens)
            part = in_group(layout, group, memory.shard)
            expected_bytes += (num_tokens - first) * part.num_cells * layout.cell_bytes
            await assert_equal_parts(memory, part, group, (first, num_tokens), whole)
        assert sum(dialer.sent[name] for dialer in dialers) == expected_bytes


async def assert_equal_parts(
    memory: RankKvMemory, part: KvShard, group: int, span: tuple[int, int], whole: torch.Tensor
) -> None:
    """The target's tokens from the first to the end are those of the source."""
    first, end = span
    if not part.num_cells:
        return
    size = (end - first) * part.num_cells * memory.kv_layout.cell_bytes
    found, expected = bytearray(size), bytearray(size)
    source, target = (
        KvRun(tables[group], first, end - first, group, part)
        for tables in (SOURCE_TABLES, TARGET_TABLES)
    )
    await memory.read_kv(target, memoryview(found))
    KvCopies(whole, memory.kv_layout).read_kv(source, memoryview(expected))
    assert found == expected and any(found)


@settings(max_examples=25)
@given(
    source=sizes,
    target=sizes,
    num_groups=st.sampled_from([1, 2]),
    heads=st.sampled_from([(8, 1), (8, 2), (8, 8), (16, 4)]),
    num_layers=st.sampled_from([3, 4, 5]),  # some stages have no layer of a group
    chunks=st.lists(st.integers(1, 16), min_size=1, max_size=3),
)
def test_each_process_receives_all_of_its_part_and_no_byte_more(
    source: tuple[int, int],
    target: tuple[int, int],
    num_groups: int,
    heads: tuple[int, int],
    num_layers: int,
    chunks: list[int],
) -> None:
    num_heads, num_kv_heads = heads
    layout = layout_of(num_layers, num_kv_heads, num_groups)
    held, wanted = (shards_of(layout, num_heads, *each) for each in (source, target))
    asyncio.run(cross(layout, held, wanted, chunks))
