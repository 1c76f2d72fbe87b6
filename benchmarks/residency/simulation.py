"""Runs a trace on simulated devices, with the scheduler's own residency policy and rates."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import process_time

import numpy as np

from benchmarks.residency.sites import Job, Site, Speed
from benchmarks.residency.trace import Trace
from services.scheduler.residency.arrival_rates import ArrivalRates
from services.scheduler.residency.view import (
    Action,
    Demands,
    Device,
    ModelDemand,
    ModelId,
    Policy,
    Resident,
)

TICK_S = 0.1  # the scheduler's tick while requests wait for cold models
FULL_TICK_S = 0.5  # while requests wait only for room on hot ones
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """A fleet of equal devices. `hot` and `standby` are the models of each device at the start; all
    others are cold on all devices.
    """

    speed: Speed
    budget_bytes: int
    weights_bytes: int
    kv_floor_bytes: int
    num_models: int
    standby: Sequence[Sequence[int]]
    hot: Sequence[Sequence[int]] = ()

    def sites(self, on_end: object) -> list[Site]:
        sites = []
        for index, standby in enumerate(self.standby):
            site = Site(f"host-{index}", self.budget_bytes, self.speed, on_end)  # type: ignore[arg-type]
            hot = self.hot[index] if self.hot else ()
            for model in range(self.num_models):
                state = "hot" if model in hot else "standby" if model in standby else "cold"
                site.host(self._resident(model, state))
            if site.used_bytes > site.budget_bytes:
                raise ValueError(f"{site.host_id}: {site.used_bytes} of {site.budget_bytes} bytes")
            sites.append(site)
        return sites

    def _resident(self, model: int, state: str) -> Resident:
        return Resident(
            model=model_id(model),
            state=state,  # type: ignore[arg-type]
            weights_bytes=self.weights_bytes,
            kv_floor_bytes=self.kv_floor_bytes,
            wake_s=self.speed.wake_s,
            start_s=self.speed.start_s,
        )


def model_id(model: int) -> ModelId:
    return f"m{model:02d}", "r1"


class FixedPolicy:
    """Dedicated devices: what is hot at the start stays hot, and nothing else is served."""

    def decide(self, devices: Sequence[Device], demands: Demands, now: float) -> list[Action]:
        return []


@dataclass(slots=True)
class Outcome:
    duration_s: float
    num_requests: int
    num_failed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)  # means of requests
    num_wakes: int = 0
    wake_s: float = 0.0
    cpu_s: float = 0.0
    num_decisions: int = 0

    def goodput_per_s(self, *, ttft_s: float, itl_s: float) -> float:
        """Returns the requests per second that met both targets."""
        is_good = (np.array(self.ttft_s) <= ttft_s) & (np.array(self.itl_s) <= itl_s)
        return float(is_good.sum() / self.duration_s)

    def ttft_percentile(self, percentile: float) -> float:
        return float(np.percentile(self.ttft_s, percentile)) if self.ttft_s else inf


class Simulation:
    def __init__(self, shape: FleetShape, policy: Policy) -> None:
        self._policy = policy
        self._sites = shape.sites(self._ended)
        self._by_host = {site.host_id: site for site in self._sites}
        self._rates = ArrivalRates()
        self._queues: dict[ModelId, deque[Job]] = {}
        self._hot: dict[ModelId, list[Site]] = {}
        self._next: list[tuple[float, int]] = []  # (time, site)
        self._tick_at = inf
        self._outcome = Outcome(0.0, 0)

    def run(self, trace: Trace) -> Outcome:
        began, outcome = process_time(), Outcome(trace.duration_s, len(trace))
        self._outcome = outcome
        for at, model, num_prompt, num_output in trace:
            self._run_until(at)
            job = Job(model, num_prompt, num_output, at)
            self._arrived(job, at)
        self._run_until(trace.duration_s + 2 * DEADLINE_S)
        outcome.num_failed += sum(map(len, self._queues.values()))
        outcome.num_wakes = sum(site.num_wakes for site in self._sites)
        outcome.wake_s = sum(site.wake_s_spent for site in self._sites)
        outcome.cpu_s = process_time() - began
        return outcome

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def _run_until(self, end: float) -> None:
        while True:
            at = min(self._tick_at, self._next[0][0] if self._next else inf)
            if at > end:
                return
            if at == self._tick_at:
                self._tick_at = inf
                self._expire(at)
                self._decide(at)
                continue
            _, index = heapq.heappop(self._next)
            site = self._sites[index]
            if at + 1e-12 < site.next_at:  # an outdated entry
                continue
            site.advance_to(at)
            self._serve(site, at)
            self._schedule(site)

    def _schedule(self, site: Site) -> None:
        if site.next_at < inf:
            heapq.heappush(self._next, (site.next_at, self._sites.index(site)))

    def _arrived(self, job: Job, now: float) -> None:
        model = model_id(job.model)
        self._rates.record(model, now)
        queue = self._queues.setdefault(model, deque())
        queue.append(job)
        self._place(model, now)
        if queue:
            self._tick_in(0.0 if not self._is_hot(model) else FULL_TICK_S, now)

    def _ended(self, job: Job, now: float) -> None:
        outcome = self._outcome
        outcome.ttft_s.append(job.first_token_at - job.arrived_at)
        outcome.itl_s.append((now - job.first_token_at) / max(1, job.num_output_tokens - 1))

    def _serve(self, site: Site, now: float) -> None:
        """Places what waits for a model of this site."""
        for model, hosted in site.hosted.items():
            if hosted.resident.state == "hot" and self._queues.get(model):
                self._place(model, now)

    def _place(self, model: ModelId, now: float) -> None:
        queue = self._queues[model]
        while queue:
            sites = [site for site in self._sites if site.has_room(model)]
            if not sites:
                return
            site = min(sites, key=lambda each: each.hosted[model].resident.num_running)
            site.add(queue.popleft(), model, now)
            self._schedule(site)

    def _expire(self, now: float) -> None:
        for queue in self._queues.values():
            while queue and queue[0].arrived_at + DEADLINE_S <= now:
                queue.popleft()
                self._outcome.num_failed += 1

    # ── residency ────────────────────────────────────────────────────────────────────────────────

    def _is_hot(self, model: ModelId) -> bool:
        return any(site.hosted[model].resident.state == "hot" for site in self._sites)

    def _tick_in(self, delay_s: float, now: float) -> None:
        self._tick_at = min(self._tick_at, now + delay_s)

    def _decide(self, now: float) -> None:
        waiting = [model for model, queue in self._queues.items() if queue]
        if not waiting:
            return
        is_cold = any(not self._is_hot(model) for model in waiting)
        self._tick_in(TICK_S if is_cold else FULL_TICK_S, now)
        if isinstance(self._policy, FixedPolicy):
            return
        devices = [site.view(now) for site in self._sites]
        self._outcome.num_decisions += 1
        by_host: dict[str, list[Action]] = {}
        for action in self._policy.decide(devices, self._demands(now), now):
            by_host.setdefault(action.host_id, []).append(action)
        for host_id, actions in by_host.items():
            site = self._by_host[host_id]
            site.order(actions, now)
            self._schedule(site)

    def _demands(self, now: float) -> dict[ModelId, ModelDemand]:
        demands = {}
        for model in self._rates.models():
            queue = self._queues.get(model)
            first = queue[0].arrived_at if queue else inf
            demands[model] = ModelDemand(
                rate=self._rates.rate(model, now),
                last_used_at=self._rates.last_used_at(model),
                num_queued=len(queue) if queue else 0,
                oldest_at=first,
                deadline_at=first + DEADLINE_S,
            )
        return demands
