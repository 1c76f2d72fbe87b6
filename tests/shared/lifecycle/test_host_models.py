"""Heartbeats of hosts with many models: their size, and what peers know after changes and loss."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from msgspec.structs import replace

from shared.background import Background
from shared.lifecycle import host_models
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.host_models import (
    MAX_REASON_CHARS,
    PAGE_MODELS,
    RESEND_S,
    AnnouncedModels,
    ReceivedModels,
)
from shared.messages import DeviceMemory, Heartbeat, HostedModel, HostLoad
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.randomness import SeededRandomness

DEVICE = DeviceMemory(device="cpu", budget_bytes=1 << 34, used_bytes=1 << 30)


def model(number: int, **changes: object) -> HostedModel:
    return HostedModel(
        **{"name": f"model-{number}", "revision": "main", "state": "cold", "device": "cpu"}
        | changes  # type: ignore[arg-type]
    )


class Host:
    def __init__(self, network: SimulatedNetwork, num_models: int) -> None:
        self.models = {number: model(number) for number in range(num_models)}
        self.monitor = HealthMonitor(
            network.bus("host-1"),
            VirtualClock(),
            SeededRandomness(1),
            roles=("host",),
            loads=Loads(
                host=lambda: HostLoad(devices=(DEVICE,), models=tuple(self.models.values()))
            ),
        )


class Peer:
    def __init__(self, network: SimulatedNetwork, name: str, *, reads_models: bool = True) -> None:
        self.received: list[Heartbeat] = []
        self.monitor = HealthMonitor(
            network.bus(name),
            VirtualClock(),
            SeededRandomness(len(name)),
            roles=("gateway",),
            reads_models=reads_models,
        )
        self.monitor.on_heartbeat(self._receive)

    def _receive(self, heartbeat: Heartbeat) -> None:
        if heartbeat.host is not None:
            self.received.append(heartbeat)

    @property
    def models(self) -> dict[str, HostedModel]:
        load = self.received[-1].host
        assert load is not None and not load.changed
        return {each.name: each for each in load.models}


@pytest.mark.parametrize("num_models", [40, 256, 1024])
def test_size_of_a_heartbeat_does_not_follow_the_registry(num_models: int) -> None:
    async def scenario() -> None:
        network = SimulatedNetwork()
        host, peer = Host(network, num_models), Peer(network, "gateway-1")
        host.models = {
            number: replace(each, failure="no file " * 1000) for number, each in host.models.items()
        }
        await peer.monitor.start()
        await host.monitor.start()
        await asyncio.sleep(RESEND_S + 4 * HEARTBEAT_INTERVAL_S)
        assert len(peer.models) == num_models
        assert {len(each.failure) for each in peer.models.values()} == {MAX_REASON_CHARS}
        load = host.monitor.describe().host
        assert load is not None and len(load.models) == num_models
        quiet = host.monitor._announced.announced(load)
        assert len(msgspec.msgpack.encode(quiet)) < 300
        late = Peer(network, "gateway-2")
        await late.monitor.start()
        await asyncio.sleep(3 * HEARTBEAT_INTERVAL_S)
        assert late.models == peer.models

    run(scenario())


def test_models_of_the_latest_hosts_alone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stolen credential may send heartbeats under any number of names."""
    monkeypatch.setattr(host_models, "MAX_HOSTS", 2)

    async def scenario() -> None:
        clock = VirtualClock()
        received = ReceivedModels(SimulatedNetwork().bus("gateway-1"), clock, Background())
        announced = AnnouncedModels(clock).announced(HostLoad(devices=(), models=(model(0),)))
        template = Heartbeat(
            process_id="host-1",
            roles=("host",),
            epoch=1,
            sequence_number=1,
            state="ready",
            interval_s=0.25,
            host=announced,
        )
        for number in (1, 2, 1, 3, 4):
            received.complete(replace(template, process_id=f"host-{number}"))
        assert list(received._known) == ["host-3", "host-4"]

    run(scenario())


def test_peers_that_need_no_models_have_none() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork()
        host, peer = Host(network, 3), Peer(network, "gateway-1", reads_models=False)
        await host.monitor.start()
        await peer.monitor.start()
        await asyncio.sleep(2.0)
        load = peer.received[-1].host
        assert load is not None and load.devices == (DEVICE,) and not load.models

    run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_peer_knows_the_models_after_changes_and_lost_heartbeats(seed: int) -> None:
    """Models change, come and go; half of all heartbeats are lost, for a while all of them."""

    async def scenario() -> None:
        draw = random.Random(seed)
        network = SimulatedNetwork()
        host = Host(network, draw.choice([3, 70, PAGE_MODELS + 5]))
        peer = Peer(network, "gateway-1")
        receive, is_deaf, share = peer.monitor.observe, False, 0.5

        def lose_some(heartbeat: Heartbeat) -> None:
            if not is_deaf and draw.random() < share:
                receive(heartbeat)

        peer.monitor.observe = lose_some  # type: ignore[method-assign]
        await peer.monitor.start()
        await host.monitor.start()
        for step in range(60):
            is_deaf = 20 < step < 40
            for _ in range(draw.choice([0, 0, 1, 3, 90])):
                number = draw.randrange(400)
                if draw.random() < 0.3:
                    host.models.pop(number, None)
                else:
                    host.models[number] = model(number, priority=draw.randrange(9))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S * draw.random() * 2)
        share = 1.0
        await asyncio.sleep(3.0)
        assert peer.models == {each.name: each for each in host.models.values()}

    run(scenario())


def test_time_that_passes_is_no_change() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork()
        host, peer = Host(network, 2), Peer(network, "gateway-1")
        host.models[0] = model(0, state="hot", hot_s=10.0)
        await peer.monitor.start()
        await host.monitor.start()
        await asyncio.sleep(6.0)
        assert peer.models["model-0"].hot_s == pytest.approx(15.5, abs=1.0)
        announced: AnnouncedModels = host.monitor._announced
        assert announced._version == 1
        host.models[0] = model(0, state="hot", hot_s=99.0)
        await asyncio.sleep(1.0)
        assert announced._version == 1

    run(scenario())
