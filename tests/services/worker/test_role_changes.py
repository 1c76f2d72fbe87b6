"""Workers with both handlers change their roles on a real NATS server, while they stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from services.cli.cluster.role_change import change_roles
from services.worker.worker import WorkerProcess, build_worker
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import StepCost
from shared.errors import ConfigError, InvalidRequest, WorkerBusy
from shared.lifecycle.heartbeat import HealthMonitor
from shared.lifecycle.worker_roles import BOTH
from shared.messages import (
    AckFinished,
    Alive,
    ChangeRoles,
    DecodeStarted,
    Finish,
    ReportAlive,
    Role,
    StartDecode,
    TokenBatch,
    WorkerRole,
)
from shared.randomness import SystemRandomness
from shared.subjects import alive, control, start_decode, tokens
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.services.live_workers import (
    BLOCK_SIZE,
    DEADLINE_S,
    MODEL,
    LiveExecutor,
    request_of,
)

NUM_STREAMS, NUM_TOKENS, STEP_S = 6, 25, 0.01
USERS = (
    *(("worker", "worker-1"), ("worker", "worker-2"), ("decode", "decode-1")),
    *(("gateway", "gateway-1"), ("scheduler", "scheduler-1"), ("operator", "operator-1")),
)


@dataclass
class Rig:
    nats: NatsServer
    folder: Path
    processes: dict[str, WorkerProcess] = field(default_factory=dict)
    buses: dict[str, NatsBus] = field(default_factory=dict)
    outputs: dict[bytes, dict[int, int]] = field(default_factory=dict)
    finishes: dict[bytes, Finish] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, worker_id: str, handled: tuple[Role, ...], announce: str = "") -> None:
        config = WorkerConfig(
            nats_url=self.nats.url(worker_id),
            process_id=worker_id,
            model_dir=self.folder,
            model_name=MODEL,
            device="cpu",
            block_size=BLOCK_SIZE,
            announce=announce,
        )
        process = await build_worker(config, handled, _load)
        assert isinstance(process, WorkerProcess)
        self.processes[worker_id] = process
        await process.start()

    async def connect(self, process_id: str) -> None:
        bus = await NatsBus.connect(self.nats.url(process_id), process_id=process_id)
        self.buses[process_id] = bus

    async def change(
        self, worker_id: str, *roles: WorkerRole, min_s: float = 0.0, is_forced: bool = False
    ) -> str:
        command, bus = ChangeRoles(roles=roles, min_s=min_s), self.buses["operator-1"]
        return await change_roles(bus, worker_id, command, is_forced=is_forced)

    async def place(
        self, worker_id: str, number: int, *candidates: str, num_tokens: int = NUM_TOKENS
    ) -> bytes:
        request = request_of(prompt_of(number))
        sampling = msgspec.structs.replace(request.sampling, max_tokens=num_tokens)
        placement_id = number.to_bytes(16, "big")
        command = StartDecode(
            placement_id=placement_id,
            request=msgspec.structs.replace(request, sampling=sampling),
            prefill_candidates=candidates,
        )
        await self.buses["scheduler-1"].request(
            start_decode(worker_id), command, DecodeStarted, timeout_s=DEADLINE_S
        )
        self.outputs[placement_id] = {}
        return placement_id

    async def acknowledge(self, worker_id: str, placement_id: bytes) -> None:
        message = AckFinished(placement_ids=(placement_id,))
        await self.buses["gateway-1"].publish(control("decode", worker_id), message)

    async def until_tokens(self, count: int) -> None:
        """Of each stream."""
        async with asyncio.timeout(DEADLINE_S):
            while min(map(len, self.outputs.values())) < count:
                self.arrived.clear()
                await self.arrived.wait()

    async def is_prefilled_by(self, worker_id: str, numbers: range) -> bool:
        """Any of these requests on worker-2: on a busy machine a handoff may time out."""
        for number in numbers:
            placement_id = await self.place("worker-2", number, worker_id)
            await self.until_tokens(NUM_TOKENS)
            if self.finishes[placement_id].served.prefill_worker_id == worker_id:
                return True
        return False

    def take(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            output = self.outputs[entry.placement_id]
            output |= dict(enumerate(entry.token_ids, entry.first_position))
            if entry.finish is not None:
                self.finishes[entry.placement_id] = entry.finish
        self.arrived.set()


def prompt_of(number: int) -> list[int]:
    """Every stream is run twice; all other prompts differ."""
    first = 100 * (number % NUM_STREAMS if number < 2 * NUM_STREAMS else number) + 16
    return list(range(first, first + 40))


def _load(config: WorkerConfig) -> LiveExecutor:
    cost = StepCost(STEP_S)
    return LiveExecutor(MonotonicClock(), num_blocks=256, block_size=BLOCK_SIZE, cost=cost)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    nats = NatsServer(tmp_path, USERS)
    rig = Rig(nats, tmp_path)
    for process_id in ("gateway-1", "scheduler-1", "operator-1"):
        await rig.connect(process_id)
    gateway = rig.buses["gateway-1"]
    monitor = HealthMonitor(gateway, MonotonicClock(), SystemRandomness(), roles=("gateway",))
    await gateway.subscribe(tokens("gateway-1"), TokenBatch, rig.take)
    await gateway.flush()
    await monitor.start()
    await monitor.transition_to("ready")
    yield rig
    await monitor.stop()
    for process in rig.processes.values():
        await process.stop()
    for bus in rig.buses.values():
        await bus.close()
    nats.stop()


async def test_streams_go_on_while_their_worker_changes_to_prefill_and_back(rig: Rig) -> None:
    await rig.start("worker-1", BOTH, "decode")
    await rig.start("worker-2", BOTH, "both")
    undisturbed = [await rig.place("worker-1", n) for n in range(NUM_STREAMS)]
    await rig.until_tokens(NUM_TOKENS)
    streams = [await rig.place("worker-1", n) for n in range(NUM_STREAMS, 2 * NUM_STREAMS)]
    await rig.until_tokens(3)
    assert await rig.change("worker-1", "prefill") == "worker-1: decode → prefill"
    assert all(each not in rig.finishes for each in streams)
    with pytest.raises(WorkerBusy, match="does prefill now, not decode"):
        await rig.place("worker-1", 100)
    assert await rig.is_prefilled_by("worker-1", range(20, 30))
    await rig.until_tokens(NUM_TOKENS)
    for before, after in zip(undisturbed, streams, strict=True):
        assert rig.outputs[after] == rig.outputs[before]
        assert rig.finishes[after].reason == "length"
    assert await rig.change("worker-1", "decode") == "worker-1: prefill → decode"
    await rig.place("worker-1", 30)
    assert not await rig.is_prefilled_by("worker-1", range(31, 33))  # worker-2 computes them


async def test_peers_reach_a_worker_under_both_roles_whatever_it_announces(rig: Rig) -> None:
    await rig.start("worker-1", BOTH)
    await rig.start("worker-2", BOTH, "prefill")
    fleet = rig.processes["worker-2"]._worker.health_monitor.fleet
    for roles in (("decode",), ("prefill",), BOTH):
        if "decode" not in roles:
            with pytest.raises(ConfigError, match="last worker that decodes timing"):
                await rig.change("worker-1", *roles)  # type: ignore[arg-type]
        await rig.change("worker-1", *roles, is_forced=True)  # type: ignore[arg-type]
        async with asyncio.timeout(DEADLINE_S):
            while (beat := fleet.heartbeat_of("worker-1")) is None or beat.roles != roles:
                await asyncio.sleep(0.01)
        assert beat.possible_roles == BOTH
        for role in BOTH:
            subject = alive(role, "worker-1")
            reply = await rig.buses["scheduler-1"].request(
                subject, ReportAlive(), Alive, timeout_s=DEADLINE_S
            )
            assert reply.epoch == beat.epoch
        assert fleet.is_live("worker-1")


async def test_refused_changes_are_one_clear_line(rig: Rig) -> None:
    await rig.start("decode-1", ("decode",))
    await rig.start("worker-1", BOTH)
    with pytest.raises(InvalidRequest, match="only the handlers of decode"):
        await rig.change("decode-1", "prefill")
    with pytest.raises(ConfigError, match="no worker 'worker-9'; the workers are: decode-1, work"):
        await rig.change("worker-9", "prefill")
    await rig.change("worker-1", "prefill", min_s=60.0)
    with pytest.raises(WorkerBusy, match="changed its roles less than 60 s ago"):
        await rig.change("worker-1", "decode", min_s=60.0)
    with pytest.raises(ConfigError, match="announce 'prefill'"):
        await rig.start("decode-1", ("decode",), "prefill")
