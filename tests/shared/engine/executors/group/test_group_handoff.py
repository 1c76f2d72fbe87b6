"""KV goes from the ranks of one worker to those of another, and decode goes on as one process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from shared.clock import MonotonicClock
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.group.kv.group_push import GroupPushPort
from shared.engine.executors.group.kv.group_receive import GroupReceipt, GroupReceivePort
from shared.engine.executors.group.kv.kv_messages import Held
from shared.engine.executors.group.kv.leader_sequence import LeaderSequence
from shared.engine.executors.group.load_group import load_group
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.kv.local_ports import LocalPushPort, LocalReceivePort
from shared.engine.kv.ports import Push, PushPort, Receipt, ReceivePort
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.step import KvRun, StepOutput
from shared.errors import ConfigError, LinkLost
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import KvTargets, SamplingParams
from shared.randomness import SystemRandomness
from tests.shared.engine.executors.group.test_groups import OPTIONS, PROMPT, SHAPE
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.rig import new_sequence
from tests.support.engine.steps import Blocks, Line
from tests.support.servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 51  # of the prompt, all but the last
CHUNKS = (20, 1, 30)
DEADLINE_S = 20
TP_1, TP_2, PP_2 = MeshShape(1, 1), MeshShape(2, 1), MeshShape(1, 2)
# Four ranks share the two key-value heads of this model, and stages have unequal layers.
MATRIX = [MeshShape(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


@dataclass
class Worker:
    executor: GroupExecutor | LocalExecutor
    push: PushPort
    receive: ReceivePort

    @classmethod
    async def load(cls, folder: Path, shape: MeshShape) -> Worker:
        if shape == TP_1:
            return await cls.of_process(load_executor(folder, **OPTIONS))
        group = await asyncio.to_thread(load_group, folder, "cpu", shape, **OPTIONS)
        return await cls.of_group(group, bind_port=two_free_ports() if shape == TP_2 else 0)

    @classmethod
    async def of_group(cls, group: GroupExecutor, bind_port: int = 0) -> Worker:
        keys = LinkKeys("aead", SystemRandomness())
        push = await GroupPushPort.open(group.kv_links, kv_compression="off", security="none")
        return cls(group, push, await open_receive(group, keys, bind_port=bind_port))

    @classmethod
    async def of_process(cls, executor: LocalExecutor) -> Worker:
        keys, clock = LinkKeys("aead", SystemRandomness()), MonotonicClock()
        server = await KvServer.start(instance_id=os.urandom(16), link_keys=keys)
        receive = LocalReceivePort(server, executor, keys, counts=server.counts)
        return cls(executor, LocalPushPort(Dialer(), executor, clock), receive)

    async def close(self) -> None:
        await self.push.close()
        await self.receive.close()
        await self.executor.close()

    async def compute(self, line: Line, num_new: int) -> StepOutput:
        """The token after them is drawn, with logprobs."""
        start, end = line.num_computed, line.num_computed + num_new
        sampling = SamplingParams(seed=7, max_tokens=99, temperature=0.9, num_logprobs=4)
        sequence = new_sequence(line.token_ids[:end], sampling)
        sequence.block_tables, sequence.first_blocks = [array("q", line.block_table)], [0]
        sequence.num_computed_tokens = start
        line.num_computed = end
        executor = self.executor
        row = ScheduledSequence(sequence, num_new, start, completes=True)
        return await executor.result(executor.submit([row]))


def two_free_ports() -> int:
    """Returns the first of two adjacent ports that are free."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first


async def open_receive(
    group: GroupExecutor, keys: LinkKeys, bind_host: str = "127.0.0.1", bind_port: int = 0
) -> GroupReceivePort:
    return await GroupReceivePort.open(
        group.kv_links,
        SystemRandomness(),
        bind_host=bind_host,
        bind_port=bind_port,
        advertised_host=None,
        kv_compression="off",
        link_keys=keys,
    )


@dataclass
class Fleet:
    """Loads each kind of worker once."""

    folder: Path
    workers: dict[MeshShape, Worker] = field(default_factory=dict)

    async def of(self, shape: MeshShape) -> Worker:
        if shape not in self.workers:
            self.workers[shape] = await Worker.load(self.folder, shape)
        return self.workers[shape]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, **SHAPE)
    it = Fleet(folder)
    yield it
    for worker in it.workers.values():
        await worker.close()


_numbers = itertools.count()


@dataclass
class Handoff:
    """One prompt whose KV `source` pushes to `target`, which may be the same worker."""

    source: Worker
    target: Worker
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    pushed: Line = field(init=False)
    reserved: Line = field(init=False)
    placement_id: bytes = field(init=False)
    sequence: LeaderSequence = field(init=False)

    def __post_init__(self) -> None:
        blocks = Blocks(self.source.executor.num_blocks, seed=next(_numbers))
        self.pushed, self.reserved = blocks.line(self.prompt), blocks.line(self.prompt)
        self.placement_id = os.urandom(16)
        self.sequence = LeaderSequence(NUM_TOKENS, block_tables=[[]])

    async def expect(self) -> Receipt:
        reserved = LeaderSequence(NUM_TOKENS, block_tables=[self.reserved.block_table])
        receipt = self.target.receive.expect(
            self.placement_id, reserved, num_held_tokens=0, prefill_worker_id="prefill-1"
        )
        await self.target.receive.ready(self.placement_id)
        return receipt

    def start(self, targets: KvTargets | None = None) -> Push:
        return self.source.push.start(
            self.placement_id,
            self.sequence,
            first_token=0,
            targets=self.target.receive.targets if targets is None else targets,
            link_key=self.target.receive.link_key("prefill-1"),
        )

    async def compute(self, push: Push) -> None:
        for num_new in CHUNKS:
            await self.compute_some(push, num_new)

    async def compute_some(self, push: Push, num_new: int) -> None:
        """The block table grows with the tokens."""
        await self.source.compute(self.pushed, num_new)
        num_blocks = -(-self.pushed.num_computed // 16)
        self.sequence.block_tables = [self.pushed.block_table[:num_blocks]]
        push.computed(self.pushed.num_computed)

    async def run(self, targets: KvTargets | None = None) -> int:
        """Returns the number of bytes that the target has received."""
        before = self.target.receive.counts.num_bytes
        num_pushed = self.source.push.counts.num_tokens
        receipt, push = await self.expect(), self.start(targets)
        running = asyncio.create_task(push.run())
        await self.compute(push)
        async with asyncio.timeout(DEADLINE_S):
            assert await running
            assert await receipt.ended is None
        await self.target.receive.forget(self.placement_id)
        assert receipt.is_complete and receipt.num_held_tokens == NUM_TOKENS
        num_pushed = self.source.push.counts.num_tokens - num_pushed
        assert num_pushed == pytest.approx(NUM_TOKENS)  # however many targets hold a head
        self.reserved.num_computed = NUM_TOKENS
        return self.target.receive.counts.num_bytes - before


def expected_bytes(target: Worker) -> int:
    """Each process of the target receives all of its own part once."""
    cells = sum(each.shard.num_cells for each in target.receive.targets)
    return NUM_TOKENS * cells * target.executor.kv_layout.cell_bytes


async def assert_continues(fleet: Fleet, source: MeshShape, target: MeshShape) -> None:
    single = await fleet.of(TP_1)
    handoff = Handoff(await fleet.of(source), await fleet.of(target))
    assert await handoff.run() == expected_bytes(handoff.target)
    local = Blocks(single.executor.num_blocks).line(PROMPT)
    await single.compute(local, NUM_TOKENS)
    for num_new in (1, 8):
        expected = await single.compute(local, num_new)
        assert await handoff.target.compute(handoff.reserved, num_new) == expected


# Stages are in MATRIX, and in test_other_host.py.
@pytest.mark.parametrize(("source", "target"), [(TP_2, TP_1), (TP_1, TP_2), (TP_2, TP_2)])
async def test_decode_continues_with_the_bits_of_one_process(
    fleet: Fleet, source: MeshShape, target: MeshShape
) -> None:
    await assert_continues(fleet, source, target)


@pytest.mark.long
@pytest.mark.parametrize("source", MATRIX)
async def test_all_pairs_of_shapes_continue(fleet: Fleet, source: MeshShape) -> None:
    for target in MATRIX:
        await assert_continues(fleet, source, target)


async def test_ranks_push_over_sealed_tcp(fleet: Fleet) -> None:
    worker = await fleet.of(TP_2)
    targets = tuple(
        msgspec.structs.replace(each, address=msgspec.structs.replace(each.address, unix_path=""))
        for each in worker.receive.targets
    )
    handoff = Handoff(worker, worker)
    assert await handoff.run(targets) == expected_bytes(worker)


async def test_cancelled_push_ends_before_all_is_computed(fleet: Fleet) -> None:
    """Its receipt holds what has arrived."""
    worker = await fleet.of(TP_2)
    handoff = Handoff(worker, worker)
    receipt, push = await handoff.expect(), handoff.start()
    running = asyncio.create_task(push.run())
    await handoff.compute_some(push, 20)
    push.cancel()
    async with asyncio.timeout(DEADLINE_S):
        assert await running is False
    await worker.receive.forget(handoff.placement_id)
    assert not receipt.is_complete and receipt.num_held_tokens in (0, 20)


async def test_frames_of_a_placement_that_is_not_expected_fail_the_push(fleet: Fleet) -> None:
    worker = await fleet.of(TP_2)
    before = worker.receive.counts.num_unknown
    handoff = Handoff(worker, worker)
    push = handoff.start()
    await handoff.compute(push)
    with pytest.raises(Exception, match="is not expected here"):
        await push.run()
    async with asyncio.timeout(DEADLINE_S):
        while worker.receive.counts.num_unknown == before:
            await asyncio.sleep(0.05)


async def test_tokens_are_held_once_all_ranks_hold_them() -> None:
    receipt = GroupReceipt(4, range(2), [])
    receipt.rank_ended(0, None)
    assert not receipt.is_complete and not receipt.ended.done()
    receipt.hold([Held(51, 16), Held(20, 16)])
    assert (receipt.num_held_tokens, receipt.num_cached_tokens) == (20, 16)
    receipt.rank_ended(1, None)
    assert receipt.is_complete and receipt.ended.result() is None
    receipt.rank_ended(1, "too late")
    assert receipt.ended.result() is None


async def test_address_of_another_host_is_a_configuration_error(fleet: Fleet) -> None:
    group = (await fleet.of(TP_2)).executor
    assert isinstance(group, GroupExecutor)
    with pytest.raises(ConfigError, match=r"data_plane_host: cannot receive KV on '192\.0\.2\.1'"):
        await open_receive(group, LinkKeys("aead", SystemRandomness()), "192.0.2.1")


async def test_ranks_listen_at_adjacent_ports(fleet: Fleet) -> None:
    first, second = (await fleet.of(TP_2)).receive.targets
    assert second.address.port == first.address.port + 1


async def test_zeroed_blocks_are_zero_on_all_ranks(fleet: Fleet) -> None:
    worker, single = await fleet.of(TP_2), await fleet.of(TP_1)
    assert isinstance(single.executor, LocalExecutor)
    handoff = Handoff(worker, single)
    receipt, push = await handoff.expect(), handoff.start()
    await worker.compute(handoff.pushed, NUM_TOKENS)
    await worker.executor.zero_blocks(handoff.pushed.block_table)
    handoff.sequence.block_tables = [handoff.pushed.block_table]
    push.computed(NUM_TOKENS)
    assert await push.run() and await receipt.ended is None
    received = bytearray(b"x" * expected_bytes(single))
    await single.executor.read_kv(
        KvRun(handoff.reserved.block_table, 0, NUM_TOKENS), memoryview(received)
    )
    assert not any(received)
    await single.receive.forget(handoff.placement_id)


FROZEN = pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.long)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, id="killed"), FROZEN])
async def test_lost_rank_ends_its_pushes_and_receipts(fleet: Fleet, number: signal.Signals) -> None:
    """The target is another worker, whose receipt sees the lost link. These are the last tests of
    the worker that dies.
    """
    dying, target = await fleet.of(TP_2), await fleet.of(TP_1)
    del fleet.workers[TP_2]
    assert isinstance(dying.executor, GroupExecutor)
    sending, receiving = Handoff(dying, target), Handoff(target, dying)
    receipt, own = await sending.expect(), await receiving.expect()
    push = sending.start()
    await sending.compute_some(push, 20)
    running = asyncio.create_task(push.run())
    async with asyncio.timeout(DEADLINE_S):
        while target.receive.counts.num_bytes == 0:
            await asyncio.sleep(0.01)
        os.kill(dying.executor.pids[1], number)
        with pytest.raises(LinkLost, match="of this worker is lost"):
            await running
        assert await receipt.ended == "the link is lost"
        assert "is lost" in str(await own.ended)
        await dying.receive.forget(receiving.placement_id)
        with pytest.raises(LinkLost):
            await Handoff(target, dying).expect()
    await target.receive.forget(sending.placement_id)
    assert not receipt.is_complete
    await dying.close()
