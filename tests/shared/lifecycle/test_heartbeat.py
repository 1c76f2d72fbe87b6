from __future__ import annotations

import asyncio

import pytest
import structlog

from shared.errors import NameInUse
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, Loss
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.identity import check_name
from shared.lifecycle.release import installed_release
from shared.messages import Heartbeat, Role, WorkerLoad
from shared.subjects import heartbeat
from shared.transport.round_trips import IN_USE_S, PROBE_INTERVAL_S, UNKNOWN_S
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.process import SimulatedProcess
from tests.support.world.randomness import SeededRandomness


class Process:
    def __init__(self, network: SimulatedNetwork, process_id: str, seed: int) -> None:
        self.step = 0
        self.is_stuck = False
        self.lost: list[tuple[str, Loss]] = []
        self.received: list[Heartbeat] = []
        self.bus = network.bus(process_id)
        self.health_monitor = HealthMonitor(
            self.bus,
            VirtualClock(),
            SeededRandomness(seed),
            roles=("decode",),
            loads=Loads(worker=self.load),
        )
        self.health_monitor.on_lost(lambda peer, loss: self.lost.append((peer, loss)))
        self.health_monitor.on_heartbeat(self.received.append)

    def load(self) -> WorkerLoad:
        self.step += not self.is_stuck
        return WorkerLoad(step=self.step, step_budget_s=0.5)

    async def join(self) -> None:
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")


async def start_three_processes(
    *, one_way_s: float = 0.0
) -> tuple[SimulatedNetwork, list[Process]]:
    network = SimulatedNetwork()
    network.distance_s = lambda sender, receiver: one_way_s
    processes = [Process(network, f"decode-{number}", number) for number in range(3)]
    for process in processes:
        await process.join()
    await asyncio.sleep(2.0)
    return network, processes


def test_processes_see_each_other_live() -> None:
    async def scenario() -> None:
        _, processes = await start_three_processes()
        for process in processes:
            assert len(list(process.health_monitor.fleet.live("decode"))) == 2
            assert process.lost == []
        own = [each for each in processes[0].received if each.process_id == "decode-0"]
        assert 8 <= len(own) <= 10
        assert {each.interval_s for each in own} == {HEARTBEAT_INTERVAL_S}
        assert {each.release for each in own} == {installed_release()}

    run(scenario())


def test_loss_before_a_peer_was_ready_is_no_warning() -> None:
    async def scenario() -> None:
        network, (first, second, _) = await start_three_processes()
        await second.health_monitor.transition_to("starting")
        with structlog.testing.capture_logs() as logs:
            network.freeze("decode-1")
            await asyncio.sleep(SILENCE_LIMIT_S + 0.5)
            network.thaw("decode-1")
            await second.health_monitor.transition_to("ready")
            await asyncio.sleep(0.5)
        assert first.lost == [("decode-1", Loss.UNRESPONSIVE)]
        shown = [(each["event"], each["log_level"]) for each in logs]
        shown = [each for each in shown if each[0] in ("peer_lost", "peer_returned")]
        assert shown == [("peer_lost", "info")] * 2 + [("peer_returned", "info")] * 2

    run(scenario())


def test_frozen_stuck_and_stopped_are_distinct_losses() -> None:
    async def scenario() -> None:
        network, (first, second, third) = await start_three_processes()
        network.freeze("decode-1")
        with structlog.testing.capture_logs() as logs:
            await asyncio.sleep(SILENCE_LIMIT_S + 0.5)
        assert first.lost == [("decode-1", Loss.UNRESPONSIVE)] == third.lost
        assert [each["event"] for each in logs].count("peer_lost") == 2
        third.is_stuck = True
        await asyncio.sleep(2.5)
        assert first.lost[1:] == [("decode-2", Loss.STUCK)]
        network.thaw("decode-1")
        with structlog.testing.capture_logs() as logs:
            await asyncio.sleep(0.5)
        returned = [each for each in logs if each["event"] == "peer_returned"]
        assert [(each["peer"], each["log_level"]) for each in returned] == [
            ("decode-1", "warning"),
            ("decode-1", "warning"),
        ]
        assert 2.5 <= returned[0]["after_s"] <= 3.5
        assert first.health_monitor.fleet.is_live("decode-1")
        await second.health_monitor.stop()
        await asyncio.sleep(0.01)
        assert first.lost[2:] == [("decode-1", Loss.STOPPED)]

    run(scenario())


def test_younger_of_two_processes_with_one_id_ends() -> None:
    async def scenario() -> None:
        _, (first, older, _) = await start_three_processes()
        network = first.bus._network
        younger = Process(network, "decode-1", seed=9)
        ended: list[str] = []
        for process in (older, younger):
            process.health_monitor.on_name_in_use = lambda error, who=process: ended.append(
                "older" if who is older else "younger"
            )
        await younger.join()
        await asyncio.sleep(1.0)
        assert set(ended) == {"younger"}
        assert Loss.DOUBLED in [loss for _, loss in first.lost]

    run(scenario())


@pytest.mark.parametrize("seeds", [(8, 9), (9, 8)])
def test_one_of_two_processes_with_one_id_ends_if_their_ages_are_too_close(
    seeds: tuple[int, int],
) -> None:
    """Each sees the age that the other had a tenth of a second ago, and takes itself for older."""

    async def scenario() -> None:
        network = SimulatedNetwork(latency_s=0.1)
        ended: list[int] = []
        for seed in seeds:
            process = Process(network, "decode-1", seed)
            process.health_monitor.on_name_in_use = lambda _, seed=seed: ended.append(seed)
            await process.join()
            await asyncio.sleep(0.01)
        await asyncio.sleep(5.0)
        assert len(set(ended)) == 1

    run(scenario())


def test_name_in_use_is_refused_at_the_start() -> None:
    async def scenario() -> None:
        network, _ = await start_three_processes()
        await check_name(network.bus("decode-9", SimulatedProcess("decode-9")), "decode")
        second = network.bus("decode-1", SimulatedProcess("decode-1"))
        with pytest.raises(NameInUse, match=r"another process on .*, up for 2 s, uses the name"):
            await check_name(second, "decode")

    run(scenario())


def test_bus_outage_causes_no_loss() -> None:
    async def scenario() -> None:
        network, processes = await start_three_processes()
        network.is_down = True
        await asyncio.sleep(20.0)
        network.is_down = False
        await asyncio.sleep(5.0)
        assert [process.lost for process in processes] == [[], [], []]

    run(scenario())


def test_disconnected_peer_is_lost_before_silent_one() -> None:
    """The server reports that the subject of a disconnected peer has no responder."""

    async def scenario() -> None:
        network, (first, second, third) = await start_three_processes()
        await second.bus.close()
        network.freeze("decode-2")
        await asyncio.sleep(0.5)
        assert first.lost == [("decode-1", Loss.DISCONNECTED)]
        await asyncio.sleep(1.0)
        assert first.lost[1:] == [("decode-2", Loss.UNRESPONSIVE)]
        assert third.lost == []

    run(scenario())


@pytest.mark.parametrize(
    ("region", "roles"), [("us", ("decode",)), ("", ("decode",)), ("eu", ("prefill", "decode"))]
)
def test_region_and_roles_are_those_of_the_credential(region: str, roles: tuple[Role, ...]) -> None:
    """The subject, which the server checks, says decode in eu."""

    async def scenario() -> None:
        network, (first, *_) = await start_three_processes()
        bus = network.bus("decode-9")
        for number, claim in enumerate([("eu", ("decode",)), (region, roles)], start=1):
            message = Heartbeat(
                process_id="decode-9",
                epoch=1,
                sequence_number=number,
                roles=claim[1],
                state="ready",
                interval_s=HEARTBEAT_INTERVAL_S,
                region=claim[0],
            )
            await bus.publish(heartbeat(("decode",), "decode-9", "eu"), message)
        await asyncio.sleep(0.1)
        known = first.health_monitor.fleet.heartbeat_of("decode-9")
        assert known is not None
        assert (known.region, known.roles, known.sequence_number) == ("eu", ("decode",), 1)
        assert first.bus.num_sender_mismatches == 1

    run(scenario())


def test_round_trips_to_peers_in_use_are_measured() -> None:
    async def scenario() -> None:
        network, (first, second, third) = await start_three_processes(one_way_s=0.15)
        round_trips = first.health_monitor.requests.round_trips
        round_trips.wait_s(second.bus.process_id, 0.1, asyncio.get_running_loop().time())
        await asyncio.sleep(30.0)
        assert 0.3 < round_trips.estimate_s(second.bus.process_id) < UNKNOWN_S
        sent = [subject.split(".")[3] for _, _, subject in network.log if "alive" in subject]
        assert third.bus.process_id not in sent
        assert 5 <= sent.count(second.bus.process_id) <= 7
        assert first.lost == second.lost == []

    run(scenario())


def test_peer_that_is_no_longer_used_is_no_longer_probed() -> None:
    """Neither probes nor the requests to late peers count as use: else each process would go on to
    probe every peer that was ever late.
    """

    async def scenario() -> None:
        network, (first, second, third) = await start_three_processes()
        round_trips = first.health_monitor.requests.round_trips
        round_trips.wait_s(second.bus.process_id, 0.1, asyncio.get_running_loop().time())
        network.freeze(third.bus.process_id)
        await asyncio.sleep(0.5)
        network.thaw(third.bus.process_id)
        await asyncio.sleep(IN_USE_S + 1.0)
        network.log.clear()
        await asyncio.sleep(3 * PROBE_INTERVAL_S)
        assert [subject for _, _, subject in network.log if "alive" in subject] == []

    run(scenario())
