"""I1: two processes with one id. I2: processes replaced one after another under load.

I1 puts two processes of one id into the fleet behind the check at the start: the first is frozen,
as a paused virtual machine, until the second has taken its name, and wakes under load.

I2 replaces the only decode worker, then the only gateway, ten times: a new one starts under the
same credential, then the old one gets SIGTERM. Clients send to gateways whose last /ready was 200,
which they poll five times in a lame duck, as a balancer does every second in the default of 5 s.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from benchmarks.adversity.cluster import FaultyCluster, cluster
from benchmarks.adversity.load import (
    PATH,
    completion,
    is_full,
    num_moves,
    print_failures,
    send_every,
)
from benchmarks.report import Bar, at_least, at_most
from benchmarks.serving.cluster import Process
from shared.lifecycle.process import HEARTH_ERROR_STATUS
from tests.support.cluster.clients import Exchange, send
from tests.support.waiting import until

NUM_REQUESTS, EVERY_S = 60, 0.05
THAW_AFTER_S = 0.5
NUM_REPLACEMENTS = 10
NUM_CLIENTS = 8
MIN_REQUESTS = 100  # least requests in ten replacements
LAME_DUCK_S, READY_POLL_S = 2.0, 0.4
STEP_S = 0.02


async def measure(rows: Sequence[str]) -> list[Bar]:
    bars: list[Bar] = []
    if "I1" in rows:
        bars += await _doubled_identity()
    if "I2" in rows:
        bars += await _rolling_replacements()
    return bars


# ── two processes with one id ────────────────────────────────────────────────────────────────────


async def _doubled_identity() -> list[Bar]:
    async with cluster({"decode-1": "decode", "decode-2": "decode"}) as fleet:
        gateway = fleet.start_services()
        other = fleet.start_worker("decode", "decode-2", step_s=STEP_S)
        together = [fleet.start_worker("decode", "decode-1", step_s=STEP_S) for _ in range(2)]
        first = await _one_left(together)
        await fleet.ready(gateway, first, other)
        late = fleet.start_worker("decode", "decode-1", step_s=STEP_S)
        await late.ended()
        exchanges, second = await _load_on_two(fleet, gateway, first)
        is_first_left = first.is_running and _was_refused(second)
        num_refused = sum(map(_was_refused, together)), int(_was_refused(late))
    print_failures("I1", exchanges)
    num_lost = NUM_REQUESTS - sum(map(is_full, exchanges))
    return [
        at_most("I1 lost, of 60", num_lost, 0, "requests"),
        at_most("I1 moves of a request", max(map(num_moves, exchanges)), 1, "moves"),
        at_least("I1 moved requests", sum(map(bool, map(num_moves, exchanges))), 1, "requests"),
        at_least("I1 younger process ended with status 2", int(is_first_left), 1, ""),
        at_least("I1 of two started together: refused with status 2", num_refused[0], 1, ""),
        at_least("I1 started later: refused with status 2", num_refused[1], 1, ""),
    ]


async def _one_left(processes: Sequence[Process]) -> Process:
    """Waits until all but one process have ended. Raises NotReached."""
    await until(lambda: sum(each.is_running for each in processes) <= 1)
    (left,) = (each for each in processes if each.is_running)
    return left


async def _load_on_two(
    fleet: FaultyCluster, gateway: Process, first: Process
) -> tuple[list[Exchange], Process]:
    """Returns the answers, and the process that started while `first` was frozen."""
    first.popen.send_signal(signal.SIGSTOP)
    second = fleet.start_worker("decode", "decode-1", step_s=STEP_S)
    await _logged(second, "ready")
    await fleet.ready(gateway, second)
    bodies = [completion(n, num_prompt_tokens=24, max_tokens=60) for n in range(NUM_REQUESTS)]
    loading = asyncio.create_task(send_every(EVERY_S, gateway.url, fleet.api_key, bodies))
    await asyncio.sleep(THAW_AFTER_S)
    first.popen.send_signal(signal.SIGCONT)
    exchanges = await loading
    await second.ended()
    return exchanges, second


async def _logged(process: Process, event: str) -> None:
    await until(lambda: bool(process.events(event)) or not process.is_running)
    if not process.is_running:
        raise RuntimeError(f"{process.process_id} ended: {process.output()[-2000:]}")


def _was_refused(process: Process) -> bool:
    """Whether the process ended with the status of a refusal and a line that names the id."""
    line = f"uses the name {process.process_id}"
    return process.popen.poll() == HEARTH_ERROR_STATUS and line in process.output()


# ── rolling replacements ─────────────────────────────────────────────────────────────────────────


@dataclass
class Clients:
    """Each sends its next request when the last one has ended, to a gateway that is ready."""

    api_key: str
    gateways: list[Process]
    exchanges: list[Exchange] = field(default_factory=list)
    _ready: list[str] = field(default_factory=list)
    _is_over: bool = False

    @property
    def num_lost(self) -> int:
        return sum(not is_full(each) for each in self.exchanges)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(each.status for each in self.exchanges)

    def num_served_by(self, url: str) -> int:
        return sum(each.gateway == url and is_full(each) for each in self.exchanges)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Clients]:
        """Runs the clients until the block ends, then waits for the requests under way."""
        async with httpx.AsyncClient(timeout=2, trust_env=False) as http:
            await self._poll(http)
            polling = asyncio.create_task(self._poll_often(http))
            clients = [asyncio.create_task(self._client(n)) for n in range(NUM_CLIENTS)]
            try:
                yield self
            finally:
                self._is_over = True
                await asyncio.gather(*clients)
                polling.cancel()

    async def _poll_often(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(READY_POLL_S)
            await self._poll(http)

    async def _poll(self, http: httpx.AsyncClient) -> None:
        ready = []
        for each in list(self.gateways):
            try:
                if (await http.get(f"{each.url}/ready")).status_code == 200:
                    ready.append(each.url)
            except httpx.HTTPError:
                continue
        self._ready = ready

    async def _client(self, number: int) -> None:
        while not self._is_over:
            body = completion(len(self.exchanges) + number, num_prompt_tokens=24, max_tokens=30)
            url = self._ready[number % len(self._ready)]
            self.exchanges.append(await send(url, self.api_key, PATH, body))


async def _rolling_replacements() -> list[Bar]:
    async with cluster({"decode": "decode"}) as fleet:
        fleet.start("kv_index", "kv_index")
        fleet.start("scheduler", "scheduler")
        gateway = _gateway(fleet, 0)
        worker = fleet.start_worker("decode", "decode.0", step_s=STEP_S)
        await fleet.ready(gateway, worker)
        gateways = [gateway]

        async def replace_worker(number: int, old: Process) -> Process:
            new = fleet.start_worker("decode", f"decode.{number}", step_s=STEP_S)
            await fleet.ready(gateway, new)
            await _leave(old)
            return new

        async def replace_gateway(number: int, old: Process) -> Process:
            new = _gateway(fleet, number)
            await fleet.ready(new, worker)
            gateways.append(new)
            await until(lambda: clients.num_served_by(new.url) > 0)
            await _leave(old)
            gateways.remove(old)
            return new

        async with Clients(fleet.api_key, gateways).running() as clients:
            worker = await _replace_often(worker, replace_worker)
        bars = _bars("workers", clients)
        async with Clients(fleet.api_key, gateways).running() as clients:
            await _replace_often(gateway, replace_gateway)
        return bars + _bars("gateways", clients)


async def _replace_often(
    process: Process, replace: Callable[[int, Process], Awaitable[Process]]
) -> Process:
    """Returns the last process."""
    for number in range(1, NUM_REPLACEMENTS + 1):
        process = await replace(number, process)
    return process


async def _leave(process: Process) -> None:
    """Stops a process by SIGTERM. Raises RuntimeError if the process does not end as asked to."""
    process.popen.terminate()
    status = await process.ended(timeout_s=60)
    if status != 0:
        raise RuntimeError(f"{process.process_id}: status {status}: {process.output()[-2000:]}")


def _gateway(fleet: FaultyCluster, number: int) -> Process:
    return fleet.start("gateway", f"gateway.{number}", options={"lame-duck-s": LAME_DUCK_S})


def _bars(kind: str, clients: Clients) -> list[Bar]:
    row = f"I2 ten replaced {kind}"
    print_failures(row, clients.exchanges)
    num_answered = len(clients.exchanges) - clients.num_lost
    return [
        at_least(f"{row}: answered", num_answered, MIN_REQUESTS, "requests"),
        at_most(f"{row}: lost", clients.num_lost, 0, "requests"),
        at_most(f"{row}: answered 503", clients.statuses[503], 0, "requests"),
    ]
