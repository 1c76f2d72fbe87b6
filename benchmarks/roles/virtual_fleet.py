"""A fleet of real services with timing workers, in virtual time: the simulation's world.

Scheduler, prefill, decode and the gateway's recovery core are the services' code; NATS and the KV
links are the simulation's. The time of a step is a formula, so a run measures the services'
decisions and not this machine, and two runs are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from services.gateway.streams.queued_openings import Opening
from services.gateway.streams.receiver import StreamEnd
from services.gateway.streams.stream_driver import StreamDriver
from shared.engine.executors.timing_executor import StepCost
from shared.lifecycle.heartbeat import HealthMonitor
from shared.lifecycle.worker_roles import BOTH
from shared.messages import Finish, Request, Role, Served, TokenLogprobs
from shared.telemetry.timeline import Move
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import HARMLESS, DataPlane
from tests.support.world.process import ProcessClock, SimulatedProcess
from tests.support.world.randomness import SeededRandomness
from tests.support.world.services import SimulatedScheduler
from tests.support.world.workers import SimulatedWorker, request_of

FORM_S = 1.5  # time until all processes know each other
END_S = 60.0  # time after the last arrival


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_input_tokens: int
    num_output_tokens: int
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    workers: tuple[tuple[Role, ...], ...]  # the roles that each announces at the start
    cost: StepCost
    num_blocks: int
    max_batch_tokens: int
    max_sequences: int = 256
    automatic_roles: str = "off"
    role_change_min_s: float = 15.0
    target_itl_s: float = 0.05


@dataclass(slots=True)
class Timeline:
    """A `stream.Receiver` that records when tokens arrive."""

    arrival: Arrival
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        now = asyncio.get_running_loop().time()
        self.token_times += [now] * len(token_ids)
        self.token_ids += token_ids
        return True

    def on_served(self, choice_index: int, served: Served) -> None:
        """Not recorded."""

    def on_moved(self, move: Move) -> None:
        """Not recorded."""

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Never requested."""

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        """Does nothing, as `on_end` follows."""

    def on_end(self, end: StreamEnd) -> None:
        self.is_finished = end.error is None
        self.has_ended.set()

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times)]

    def meets(self, ttft_s: float, itl_s: float) -> bool:
        """Whether it ended well, with these targets of the first token and of the mean gap."""
        if not self.is_finished or self.ttft_s > ttft_s:
            return False
        gaps = self.gaps_s
        return not gaps or sum(gaps) / len(gaps) <= itl_s


@dataclass(slots=True)
class FleetRun:
    timelines: list[Timeline]
    # (seconds since the first arrival was possible, roles of each worker), at each change
    roles: list[tuple[float, tuple[str, ...]]]


def run_fleet(options: FleetOptions, arrivals: Sequence[Arrival]) -> FleetRun:
    return run(_run(options, arrivals), limit_s=arrivals[-1].at_s + FORM_S + 2 * END_S)


async def _run(options: FleetOptions, arrivals: Sequence[Arrival]) -> FleetRun:
    network = SimulatedNetwork(seed=1)
    workers = _workers(network, options)
    scheduler = SimulatedScheduler(
        network,
        "scheduler-0",
        seed=2,
        max_queued_requests=100_000,
        max_queued_tokens=10**9,
        automatic_roles=options.automatic_roles,
        role_change_min_s=options.role_change_min_s,
        target_itl_s=options.target_itl_s,
    )
    gateway = SimulatedProcess("gateway-0")
    bus, clock = network.bus("gateway-0", gateway), ProcessClock(gateway)
    monitor = HealthMonitor(bus, clock, SeededRandomness(3), roles=("gateway",))
    driver = StreamDriver(bus, clock, monitor, on_report=lambda report: None)
    await gateway.start(_start_gateway(driver, monitor))
    await scheduler.process.start(scheduler.start())
    for worker in workers:
        await worker.start()
    await asyncio.sleep(FORM_S)
    network.log.clear()
    timelines = [Timeline(each) for each in arrivals]
    history = _RoleHistory(workers)
    watching = asyncio.create_task(history.run())
    await gateway.start(_send_all(driver, timelines))
    await _until_ended(timelines)
    watching.cancel()
    return FleetRun(timelines, history.changes)


async def _start_gateway(driver: StreamDriver, monitor: HealthMonitor) -> None:
    await driver.start()
    await monitor.start()
    await monitor.transition_to("ready")


def _workers(network: SimulatedNetwork, options: FleetOptions) -> list[SimulatedWorker]:
    plane = DataPlane(fate=lambda sender, receiver, header: HARMLESS)
    return [
        SimulatedWorker(
            network,
            plane,
            f"worker-{number}",
            BOTH,
            announced=announced,
            num_blocks=options.num_blocks,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
            cost=options.cost,
        )
        for number, announced in enumerate(options.workers)
    ]


class _RoleHistory:
    def __init__(self, workers: Iterable[SimulatedWorker]) -> None:
        self._workers = list(workers)
        self._began_at = asyncio.get_running_loop().time()
        self.changes: list[tuple[float, tuple[str, ...]]] = []

    async def run(self) -> None:
        while True:
            roles = tuple("+".join(each.worker.roles.current) for each in self._workers)
            if not self.changes or self.changes[-1][1] != roles:
                since_s = asyncio.get_running_loop().time() - self._began_at
                self.changes.append((round(since_s, 2), roles))
            await asyncio.sleep(0.05)


async def _send_all(driver: StreamDriver, timelines: Sequence[Timeline]) -> None:
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    for number, timeline in enumerate(timelines):
        delay_s = began_at + timeline.arrival.at_s - loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        timeline.sent_at = loop.time()
        driver.open([Opening(request_of_arrival(number, timeline.arrival), timeline)])


def request_of_arrival(number: int, arrival: Arrival, *, gateway_id: str = "gateway-0") -> Request:
    """Returns a request whose prompt shares no prefix with others."""
    randomness, num_tokens = SeededRandomness(number), arrival.num_output_tokens
    prompt = [16 + randomness.below(31_000) for _ in range(arrival.num_input_tokens)]
    request = request_of(
        prompt, seed=number, max_tokens=num_tokens, min_tokens=num_tokens, gateway_id=gateway_id
    )
    return msgspec.structs.replace(request, request_id=f"r{number}")


async def _until_ended(timelines: Sequence[Timeline]) -> None:
    """All requests, or END_S after the last arrival."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            for each in timelines:
                await each.has_ended.wait()
