"""What one of 300 sites receives while nobody sends requests: states, models, round trips.

The site has two gateways and two schedulers, and a link to each of 299 sites of the same shape, in
which 10,000 workers serve 4 of 40 models. All of them are the services' own code on a virtual
clock, and what arrives is what the real codec wrote, with subject and the protocol's line, before
the compression that nats-server uses on leaf nodes. The loads change with every state.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from random import Random

from benchmarks.report import Bar, Row, at_most
from shared.lifecycle.health import SITE_INTERVAL_S
from shared.messages import Heartbeat, ModelCard, WorkerLoad
from shared.transport.round_trips import SITE_PROBE_INTERVAL_S
from tests.support.records import model_card
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run as run_virtually
from tests.support.world.gateway import StreamGateway
from tests.support.world.links import LinkedNetworks
from tests.support.world.services import SimulatedScheduler

NUM_SITES, NUM_WORKERS, NUM_MODELS, MODELS_OF_SITE = 300, 10_000, 40, 4
NUM_GATEWAYS = NUM_SCHEDULERS = 2
REGIONS = ("eu-west", "us-east", "ap-south")
WARM_UP_S = 5.0
DELAY_S = 0.05
LINE_BYTES = len("LMSG  1000\r\n\r\n")
MAX_BYTES_PER_S = 200_000.0
SEED = 0


def run(scale: float) -> tuple[list[Row], list[Bar]]:
    lasts_s = SITE_PROBE_INTERVAL_S * scale
    gc.disable()  # traversing 1,200 processes takes longer than to run them
    counted = run_virtually(_count(lasts_s), limit_s=1000.0)
    gc.enable()
    per_s = {name: size / lasts_s for name, size in counted.bytes.items()}
    rows: list[Row] = [
        {
            "what": name,
            "messages_per_s": round(counted.messages[name] / lasts_s, 1),
            "kB_per_s": round(size / 1e3, 2),
        }
        for name, size in sorted(per_s.items())
    ]
    total = sum(per_s.values())
    rows.append(
        {
            "what": "all",
            "messages_per_s": round(counted.messages.total() / lasts_s, 1),
            "kB_per_s": round(total / 1e3, 2),
            "known_workers_of_sites": counted.num_known,
        }
    )
    rows.append(
        {
            "what": "all, in the first 5 s",
            "messages_per_s": round(counted.num_first / WARM_UP_S, 1),
            "kB_per_s": round(counted.first_bytes / WARM_UP_S / 1e3, 2),
        }
    )
    return rows, [
        at_most("bytes that one of 300 sites receives", total, MAX_BYTES_PER_S, "bytes/s")
    ]


class _Counted:
    def __init__(self) -> None:
        self.messages, self.bytes = Counter[str](), Counter[str]()
        self.num_first = self.first_bytes = self.num_known = 0

    def take(self, site: str, subject: str, data: bytes) -> None:
        if site == "site-0":
            name = ".".join(subject.split(".")[4:8:3]) if subject else "reply"
            self.messages[name] += 1
            self.bytes[name] += len(data) + len(subject) + LINE_BYTES

    def clear(self) -> None:
        self.num_first, self.first_bytes = self.messages.total(), self.bytes.total()
        self.messages.clear()
        self.bytes.clear()


class _Site:
    """The processes of one site but its workers, whose heartbeats are made here."""

    def __init__(self, number: int, network: SimulatedNetwork) -> None:
        self.number, self._random, self._num_beats = number, Random(SEED + number), 0
        name = f"site-{number}"
        credentials = [f"{self._random.getrandbits(48):012x}" for _ in range(4)]
        self.gateways = [
            StreamGateway(
                network,
                f"gateway.{each}",
                seed=number,
                site=name,
                region=region_of(number),
            )
            for each in credentials[:NUM_GATEWAYS]
        ]
        self.schedulers = [
            SimulatedScheduler(
                network, f"scheduler.{each}", seed=number, max_queued_requests=100, site=name
            )
            for each in credentials[-NUM_SCHEDULERS:]
        ]
        own = range(number, NUM_WORKERS, NUM_SITES)
        self._loads = {f"worker-{each}": self._load(0) for each in own}
        models = self._random.sample(range(NUM_MODELS), MODELS_OF_SITE)
        self._cards = [card_of(each) for each in models]

    async def start(self) -> None:
        for gateway in self.gateways:
            await gateway.start()
        for scheduler in self.schedulers:
            await scheduler.start()
        self._beat()

    def _beat(self) -> None:
        """Workers report once a second, to their site's gateways: these sum the loads."""
        self._num_beats += 1
        for index, name in enumerate(self._loads):
            heartbeat = Heartbeat(
                process_id=name,
                epoch=1,
                sequence_number=self._num_beats,
                roles=("prefill", "decode"),
                state="ready",
                interval_s=SITE_INTERVAL_S,
                load=self._load(self._num_beats),
                model=self._cards[index % MODELS_OF_SITE],
            )
            for gateway in self.gateways:
                gateway.health_monitor.observe(heartbeat)
        asyncio.get_running_loop().call_later(SITE_INTERVAL_S, self._beat)

    def _load(self, step: int) -> WorkerLoad:
        """Returns counters as after a month of work."""
        below = self._random.randrange
        return WorkerLoad(
            step=step,
            step_budget_s=60.0,
            num_running=below(64),
            num_free_blocks=below(20_000),
            num_total_blocks=20_000,
            prefill_tokens_in_flight=below(100_000),
            decode_tokens_in_flight=below(1_000_000),
            num_generated_tokens=10**9 + below(10**9),
            num_computed_prompt_tokens=10**10 + below(10**10),
            num_busy_steps=10**8 + below(10**8),
            busy_s=2e6 + self._random.random(),
        )


def card_of(number: int) -> ModelCard:
    return model_card(
        name=f"organisation-{number % 7}/Model-{number}-70B-Instruct",
        revision=f"{number:064x}",
        kv_format="bf16/l80/h8/d128/b64",
        block_size=64,
        max_context_tokens=131_072,
        features=("grammar/1",),
    )


def region_of(number: int) -> str:
    return REGIONS[number % len(REGIONS)]


async def _count(lasts_s: float) -> _Counted:
    counted, names = _Counted(), [f"site-{number}" for number in range(NUM_SITES)]
    networks = {name: SimulatedNetwork(seed=SEED) for name in names}
    linked = LinkedNetworks(
        networks,
        {name: region_of(number) for number, name in enumerate(names)},
        delay_s=DELAY_S,
        pairs=[(names[0], name) for name in names[1:]],
    )
    linked.taps.append(counted.take)
    sites = [_Site(number, networks[name]) for number, name in enumerate(names)]
    for each in sites:
        await each.start()
        await asyncio.sleep(SITE_INTERVAL_S / NUM_SITES)
    await asyncio.sleep(WARM_UP_S - SITE_INTERVAL_S)
    counted.clear()
    await asyncio.sleep(lasts_s)
    fleet = sites[0].schedulers[0].service.health_monitor.fleet
    counted.num_known = sum("/" in each.process_id for each in fleet.live("decode"))
    return counted
