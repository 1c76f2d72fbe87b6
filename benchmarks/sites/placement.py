"""300 sites, 10,000 workers: the schedulers' own code on a virtual clock.

Every site is linked to every other one and serves one model, which all of them serve, with two
gateways; half of its workers prefill, half decode. So a scheduler knows its 33 or 34 workers and
598 gateways of other sites, from states that cross each link once a second, encoded by the real
codec. A fifth of the sites gets 1.6 times what its workers can do, the others 0.65 of it; every
fifth request must stay in the region of its site. Sites of a region are 20 ms apart (round trip),
others 120 ms.

A decision is the CPU time of all that a scheduler computes for a request besides messages, with
the tries before in which it found no room; a mean is without the slowest hundredth.
"""

from __future__ import annotations

import gc
import heapq
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate, count
from random import Random

import msgspec
import numpy as np

from benchmarks.report import Bar, Row, at_least, at_most
from benchmarks.simulate.figures import usual_mean
from benchmarks.simulate.sites import Costs, Job
from benchmarks.simulate.trace import TraceRequest
from benchmarks.simulate.workloads import log_uniform
from benchmarks.sites.traffic import LINE_BYTES, NUM_SITES, NUM_WORKERS, region_of
from benchmarks.sites.virtual_site import Arrival, Outcome, VirtualSite
from services.scheduler import cost_kernel
from shared.lifecycle.health import SITE_INTERVAL_S
from shared.messages import SiteModels, SiteState, StartDecode
from shared.sites.site_workers import SiteWorkers
from shared.subjects import state_to_sites

NUM_REQUESTS = 250_000  # a million with --scale 4: ten minutes of a core
GATEWAYS = ("gateway.000000000000", "gateway.ffffffffffff")
NEAR_S, FAR_S = 0.01, 0.06  # one way
SEED = 11
BUSY_SHARE, BUSY_LOAD, USUAL_LOAD = 0.2, 1.6, 0.65
BOUND_SHARE = 0.2  # of requests that must stay in their region
MIN_TOKENS, MAX_TOKENS = 128, 4096
COSTS = Costs()
MAX_DECISION_US = 150.0
GOOD_TTFT_S, GOOD_TPOT_S = 2.0, 0.1
_encode = msgspec.msgpack.Encoder().encode


def run(scale: float) -> tuple[list[Row], list[Bar]]:
    cost_kernel.load()  # as a scheduler does once it has a worker
    gc.disable()
    world = _World(round(NUM_REQUESTS * scale))
    world.run()
    gc.enable()
    rows = [_row(world, "linked")]
    return rows, [
        at_most(
            "time of a decision",
            rows[0]["decision_us"],
            MAX_DECISION_US,
            "us",
        ),
        at_least("requests that ended", float(rows[0]["ended"]), float(world.num_requests), ""),
    ]


def _row(world: _World, name: str) -> Row:
    outcome = world.outcome
    ttft_s, tpot_s = np.array(outcome.ttft_s), np.array(outcome.tpot_s)
    home_ns, link_ns = np.array(outcome.home_ns), np.array(outcome.link_ns)
    good = (ttft_s <= GOOD_TTFT_S) & (tpot_s <= GOOD_TPOT_S)
    return {
        "sites": name,
        "requests": world.num_requests,
        "ended": len(ttft_s),
        "over_links": len(link_ns),
        "good": round(float(good.mean()), 4),
        "ttft_p50_ms": round(float(np.percentile(ttft_s, 50)) * 1e3, 1),
        "ttft_p99_ms": round(float(np.percentile(ttft_s, 99)) * 1e3, 1),
        "decision_us": round(usual_mean(np.concatenate([home_ns, link_ns])) / 1e3, 1),
        "at_home_us": round(usual_mean(home_ns) / 1e3, 1),
        "over_link_us": round(usual_mean(link_ns) / 1e3, 1) if len(link_ns) else None,
        "virtual_s": round(world.now, 1),
        "states_kB_per_s_and_site": round(world.state_bytes / world.now / 1e3, 1),
        "requests_kB_per_s_and_site": round(world.command_bytes / world.now / NUM_SITES / 1e3, 1),
    }


class _World:
    def __init__(self, num_requests: int) -> None:
        self.now, self.num_requests, self.outcome = 0.0, num_requests, Outcome()
        self.state_bytes = self.command_bytes = 0  # a site gets the states of all others
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._order, self._random = count(), Random(SEED)
        self._num_open = self._num_left = num_requests
        # all near receivers make the same of a state, and all far ones, which have it later
        self._converters = {True: SiteWorkers(), False: SiteWorkers()}
        self.sites: list[VirtualSite] = []
        for number in range(NUM_SITES):
            num_workers = len(range(number, NUM_WORKERS, NUM_SITES))
            site = VirtualSite(
                f"site-{number}",
                region_of(number),
                num_workers=num_workers,
                costs=COSTS,
                later=self.later,
                random_below=self._random.randrange,
                outcome=self.outcome,
                max_queued_requests=10_000,
            )
            site.send = partial(self._send, number)
            self.sites.append(site)
            self.later(self._random.random() * SITE_INTERVAL_S, self._report, number)
        self._numbers = {each.name: number for number, each in enumerate(self.sites)}
        mean_tokens = (MAX_TOKENS - MIN_TOKENS) / np.log(MAX_TOKENS / MIN_TOKENS)
        site_per_s = len(self.sites[0].prefills) / COSTS.prefill_s(round(mean_tokens))
        is_busy = [self._random.random() < BUSY_SHARE for _ in self.sites]
        self._loads = list(accumulate(BUSY_LOAD if each else USUAL_LOAD for each in is_busy))
        self._per_s = site_per_s * self._loads[-1]
        self.later(1.5 * SITE_INTERVAL_S, self._arrive, None)

    def later(self, delay_s: float, act: Callable[..., None], argument: object) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), act, argument))

    def run(self) -> None:
        while self._num_open:
            self.now, _, act, argument = heapq.heappop(self._events)
            act(self.now, argument)

    def one_way_s(self, first: int, second: int) -> float:
        return NEAR_S if region_of(first) == region_of(second) else FAR_S

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def _arrive(self, now: float, _: object) -> None:
        random = self._random
        (number,) = random.choices(range(NUM_SITES), cum_weights=self._loads)
        regions = (region_of(number),) if random.random() < BOUND_SHARE else ()
        trace = TraceRequest(
            now * 1e3, log_uniform(random, MIN_TOKENS, MAX_TOKENS), random.randint(16, 64), []
        )
        self.sites[number].submit(now, Arrival(trace, now, regions, self._ended))
        self._num_left -= 1
        if self._num_left:
            self.later(random.expovariate(self._per_s), self._arrive, None)
        if self._num_left % 50_000 == 0:
            print(f"{self._num_left} to come, {now:.1f} s", file=sys.stderr, flush=True)

    def _ended(self, job: Job, now: float, hop_s: float = 0.0) -> None:
        trace = job.trace
        self._num_open -= 1
        self.outcome.ttft_s.append(job.first_token_at + hop_s - job.submitted_at)
        num_later = max(1, trace.output_length - 1)
        self.outcome.tpot_s.append(max(0.0, now - job.first_token_at) / num_later)

    def _send(
        self,
        number: int,
        gateway_id: str,
        command: StartDecode,
        arrival: Arrival,
        replied: Callable[[float, bool], None],
    ) -> None:
        there = self._numbers[gateway_id.partition("/")[0]]
        hop_s = self.one_way_s(number, there)
        self.command_bytes += len(_encode(command))
        taken = Arrival(arrival.trace, arrival.arrived_at, (), partial(self._ended, hop_s=hop_s))

        def arrive(now: float, _: object) -> None:
            is_taken = self.sites[there].serve(now, command, taken)
            self.later(hop_s, replied, is_taken)

        self.later(hop_s, arrive, None)

    # ── states ───────────────────────────────────────────────────────────────────────────────────

    def _report(self, now: float, number: int) -> None:
        for gateway, (state, models) in zip(
            GATEWAYS, self.sites[number].states(GATEWAYS), strict=True
        ):
            subject_bytes = len(state_to_sites(gateway)) + len(gateway)
            self.state_bytes += len(_encode(state)) + subject_bytes + LINE_BYTES
            for is_near in (True, False):
                delay_s = NEAR_S if is_near else FAR_S
                self.later(delay_s, self._deliver, (number, is_near, state, models))
        self.later(SITE_INTERVAL_S, self._report, number)

    def _deliver(self, now: float, argument: tuple[int, bool, SiteState, SiteModels]) -> None:
        number, is_near, state, models = argument
        workers = self._converters[is_near]
        if not workers.knows_models(state):
            workers.learn(models, now)
        heartbeats = workers.heartbeats(state, now)
        for other, site in enumerate(self.sites):
            one_way_s = self.one_way_s(number, other)
            if other != number and (one_way_s == NEAR_S) == is_near:
                if site.round_trips.measured_s(state.gateway_id) is None:
                    site.round_trips.record(state.gateway_id, 2 * one_way_s, now)
                site.take_states(now, heartbeats)
