"""A worker is seen while it loads, gets no work, and is one process with the later one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.worker.worker import build_worker
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.errors import CheckpointError
from shared.fleet.fleet_view import FleetView
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import Heartbeat
from shared.randomness import SystemRandomness
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.services.live_workers import BLOCK_SIZE, MODEL, LiveExecutor
from tests.support.waiting import until

USERS = (("decode", "decode-1"), ("gateway", "gateway-1"))


async def test_loading_worker_is_seen_and_gets_no_work(tmp_path: Path) -> None:
    nats, may_load = NatsServer(tmp_path, USERS), threading.Event()  # type: ignore[arg-type]
    config = WorkerConfig(
        nats_url=nats.url("decode-1"),
        process_id="decode-1",
        model_dir=tmp_path,
        model_name=MODEL,
        device="cpu",
        block_size=BLOCK_SIZE,
    )

    def load(_: WorkerConfig) -> LiveExecutor:
        may_load.wait()
        return LiveExecutor(MonotonicClock(), num_blocks=64, block_size=BLOCK_SIZE)

    def fail(_: WorkerConfig) -> Any:
        raise CheckpointError("no weights")

    bus = await NatsBus.connect(nats.url("gateway-1"), process_id="gateway-1")
    monitor = HealthMonitor(bus, MonotonicClock(), SystemRandomness(), roles=("gateway",))
    view, beats = FleetView(monitor.fleet), list[Heartbeat]()
    monitor.on_heartbeat(lambda beat: view.observe(beat, 0.0))
    monitor.on_heartbeat(beats.append)
    await monitor.start()

    def states() -> list[str]:
        return [each.state for each in view.rows() if each.is_worker]

    with structlog.testing.capture_logs() as logs:
        starting = asyncio.create_task(build_worker(config, ("decode",), load))
        await until(lambda: states() == ["loading"])
        (row,) = (each for each in view.rows() if each.is_worker)
        assert (row.process_id, row.model) == ("decode-1", MODEL)
        assert list(monitor.fleet.live("decode")) == []
        may_load.set()
        worker = await starting
        await worker.start()
        await until(lambda: states() == ["ready"])
        assert [each.process_id for each in monitor.fleet.live("decode")] == ["decode-1"]
        own = [each for each in beats if each.process_id == "decode-1"]
        assert {each.state for each in own} == {"starting", "ready"}  # known to every release
        assert len({each.epoch for each in own}) == 1
        await worker.stop()
        with pytest.raises(CheckpointError):
            await build_worker(config, ("decode",), fail)
        await until(lambda: states() == ["stopped"])
        await monitor.stop()
        await bus.close()
    (started,) = (each for each in logs if each["event"] == "worker_started")
    assert min(started[f"{stage}_s"] for stage in ("imports", "connect", "load", "join")) > 0
    events = [each["event"] for each in logs]
    assert "peer_lost" not in events and "nats_disconnected" not in events
    nats.stop()
