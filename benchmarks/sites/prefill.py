"""Prefill at a distance, with the speeds of a published case, in virtual time: the scheduler's own
placement, which may have a prompt computed at another site if its KV is here sooner.

The case is that of Qin et al., "Prefill-as-a-Service" (arXiv 2604.15039): a hybrid model of 1T
parameters; 64 H20 decode, and prefill what is short; 32 H200 behind 100 Gbit/s prefill what is
long; eight GPUs an instance. Prompts are log-normal (mu 9.90, sigma 1.00) from 128 tokens to 128K,
answers 1,024 tokens. From the paper are these, the counts of instances, and the throughputs of its
Table 6, from which the speeds here follow by its own equations:

    H20   9 instances compute 2.11 prompts/s of the mean of 27K tokens: 158 us a token
    H200  4 instances compute half of 3.24/s, of the mean 44K: 57 us a token
    KV    13 Gbit/s for these: 23 kB a token
    decode of an instance: 3 for 2.11 answers/s: 720 tokens/s

Assumed: 40 tokens/s of one answer, and memory for as many at once as that throughput takes; a
round trip of 20 ms; nothing is cached. The paper's system gains 1.54 x over 96 H20. Here a request
is good if its first token comes within 5 s and twice the time in which an idle H20 computes its
prompt, and later ones every 30 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import msgspec
import numpy as np

from benchmarks.report import Bar, Row, at_least
from benchmarks.simulate.policies import Hearth
from benchmarks.simulate.simulation import CARD, HEARTBEAT_S, FleetShape, Simulation
from benchmarks.simulate.sites import Costs, Decode, Job, Prefill
from benchmarks.simulate.trace import TraceRequest
from benchmarks.simulate.workloads import Blocks
from benchmarks.sites.plots import plot_lines
from services.scheduler import cost_kernel
from services.scheduler.fleet import WorkerFleet
from shared.lifecycle.health import SITE_INTERVAL_S
from shared.messages import Heartbeat, SitePushes, WorkerLoad
from shared.sites.kv_targets import KV_FROM_SITES

FAR = "far/gateway/00ff"  # the other site, as the scheduler here knows it
KV_BYTES = 23_000  # of a token
LINK_BYTES_PER_S, RDMA_BYTES_PER_S = 100e9 / 8, 800e9 / 8
ONE_WAY_S = 0.01
H20_TOKEN_S, H200_TOKEN_S = 158e-6, 57e-6
STEP_S = 0.025
DECODE_BLOCKS = 1341  # three instances then decode 2.11 answers/s while requests always wait
NUM_FAR = 4
OUTPUT_TOKENS = 1024
NUM_REQUESTS = 1000
LOADS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0)  # requests/s
MAX_TPOT_S = 0.03
SEED = 5
H20 = Costs(
    prefill_step_s=0.0,
    prefill_token_s=H20_TOKEN_S,
    decode_step_s=STEP_S,
    decode_sequence_s=0.0,
    decode_kv_token_s=0.0,
    push_token_s=KV_BYTES / RDMA_BYTES_PER_S,
    num_blocks=DECODE_BLOCKS,
)
H200 = replace(
    H20, prefill_token_s=H200_TOKEN_S, push_token_s=KV_BYTES / LINK_BYTES_PER_S, num_blocks=400
)
CARD_OF_CASE = msgspec.structs.replace(CARD, kv_bytes_per_token=KV_BYTES, features=(KV_FROM_SITES,))


@dataclass(frozen=True)
class Shape:
    name: str
    num_prefill: int
    num_decode: int
    has_far: bool = False


LOCAL = tuple(Shape(f"64 H20, {n} prefill", n, 8 - n) for n in (3, 5, 6))
BASELINE = Shape("96 H20, 9 prefill (the paper's baseline)", 9, 3)
LINKED = Shape("64 H20, 3 prefill, and 32 H200 far away", 3, 5, has_far=True)


def run(scale: float) -> tuple[list[Row], list[Bar]]:
    cost_kernel.load()
    num_requests = round(NUM_REQUESTS * scale)
    of_shape = {
        shape.name: [case_row(shape, per_s, num_requests) for per_s in LOADS]
        for shape in (*LOCAL, BASELINE, LINKED)
    }
    if scale >= 1:
        lines = {name: [_point(each) for each in rows] for name, rows in of_shape.items()}
        plot_lines("sites_prefill", lines, x="requests/s", y="good requests/s")
    rows = [max(each, key=lambda row: float(row["goodput_per_s"])) for each in of_shape.values()]
    local = max(row["goodput_per_s"] for row in rows[: len(LOCAL)])
    baseline, linked = rows[-2]["goodput_per_s"], rows[-1]["goodput_per_s"]
    return rows, [
        at_least("goodput, to the best of the site alone", linked / local, 1.3, "x"),
        at_least("goodput, to as many GPUs at one site", linked / baseline, 1.3, "x"),
    ]


def _point(row: Row) -> tuple[float, float]:
    return row["load_per_s"], row["goodput_per_s"]


def case_row(shape: Shape, per_s: float, num_requests: int) -> Row:
    simulation = _Case(shape)
    outcome = simulation.run(prompts(per_s, num_requests))
    lasted_s = num_requests / per_s
    ttft_s = np.array(outcome.ttft_s)
    far = simulation.far
    return {
        "workers": shape.name,
        "load_per_s": per_s,
        "goodput_per_s": round(simulation.num_good / lasted_s, 3),
        "ttft_mean_s": round(float(ttft_s.mean()), 2),
        "ttft_p90_s": round(float(np.percentile(ttft_s, 90)), 2),
        "prefilled_far": round(0.0 if far is None else far.num_jobs / num_requests, 3),
        "mean_tokens_far": 0 if far is None else round(far.num_tokens / max(1, far.num_jobs)),
        "link_Gbit_per_s": round(
            0.0 if far is None else far.num_tokens * KV_BYTES * 8 / lasted_s / 1e9, 2
        ),
    }


def prompts(per_s: float, num_requests: int) -> Iterator[TraceRequest]:
    draw, blocks, at_s = Random(SEED), Blocks(), 0.0
    for _ in range(num_requests):
        at_s += draw.expovariate(per_s)
        num_tokens = 0
        while not 128 <= num_tokens <= 131_072:
            num_tokens = round(draw.lognormvariate(9.90, 1.00))
        yield TraceRequest(at_s * 1e3, num_tokens, OUTPUT_TOKENS, blocks.new(num_tokens))


# ── the other site ───────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _FarEngine(Prefill):
    """Pushes while it computes; all engines of the site share its link."""

    far: _FarSite = field(kw_only=True)

    def _ended(self, now: float, job: Job) -> None:
        self.num_queued_tokens -= job.num_computed_tokens
        self.count_prefill(job.num_computed_tokens)
        push_s = job.num_tokens * self.costs.push_token_s
        self.far.link_free_at = max(self.begun_at, self.far.link_free_at) + push_s
        self.far.pushed(job, push_s)
        arrives_at = max(now, self.far.link_free_at) + ONE_WAY_S
        self.later(arrives_at - now, job.decode.activate, job)
        self.current = None
        if self.queue:
            self._begin(now)


@dataclass(eq=False)
class _FarSite(Prefill):
    """The engines of the other site as one prefill worker; its own scheduler takes the freest."""

    link_free_at: float = 0.0
    num_jobs: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engines = [
            _FarEngine(f"h200-{number}", self.costs, self.later, self.tell, far=self)
            for number in range(NUM_FAR)
        ]
        self.pushes: dict[Decode, SitePushes] = {}

    def enqueue(self, now: float, job: Job) -> None:
        self.num_jobs += 1
        self.num_tokens += job.num_tokens
        self.later(ONE_WAY_S, self._arrive, job)

    def _arrive(self, now: float, job: Job) -> None:
        min(self.engines, key=lambda each: each.load(now).prefill_tokens_in_flight).enqueue(
            now, job
        )

    def pushed(self, job: Job, push_s: float) -> None:
        before = self.pushes.get(job.decode, SitePushes("far"))
        self.pushes[job.decode] = SitePushes(
            "far",
            before.num_tokens + job.num_tokens,
            before.num_bytes + job.num_tokens * KV_BYTES,
            before.link_s + push_s,
        )

    def load(self, now: float) -> WorkerLoad:
        """Returns the load of the mean engine, as the site reports it."""
        self.step += 1
        loads = [each.load(now) for each in self.engines]
        return WorkerLoad(
            step=self.step,
            step_budget_s=60.0,
            num_engines=NUM_FAR,
            num_free_blocks=self.costs.num_blocks,
            num_total_blocks=self.costs.num_blocks,
            prefill_tokens_in_flight=_mean([each.prefill_tokens_in_flight for each in loads]),
            num_computed_prompt_tokens=_mean([each.num_computed_prompt_tokens for each in loads]),
            num_busy_steps=_mean([each.num_busy_steps for each in loads]),
            busy_s=sum(each.busy_s for each in loads) / NUM_FAR,
        )


def _mean(values: list[int]) -> int:
    return sum(values) // NUM_FAR


class _Case(Simulation):
    def __init__(self, shape: Shape) -> None:
        self._shape, self.num_good = shape, 0
        self.far: _FarSite | None = None
        super().__init__(
            FleetShape(shape.num_prefill, shape.num_decode, costs=H20, max_queued_requests=100_000),
            Hearth(Random(SEED).randrange),
            seed=SEED,
        )

    def _build(self, shape: FleetShape) -> None:
        self._workers = WorkerFleet(self._health, lambda _: 2 * ONE_WAY_S)
        super()._build(shape)
        if self._shape.has_far:
            self.far = _FarSite(FAR, H200, self._later, lambda _: None)
            self._sites[FAR] = self.far
            self._beat(0.0, self.far)

    def _beat(self, now: float, site: Decode | Prefill, *, is_first: bool = False) -> None:
        load, is_far = site.load(now), site is self.far
        if isinstance(site, Decode) and self.far is not None and site in self.far.pushes:
            load = msgspec.structs.replace(load, site_pushes=(self.far.pushes[site],))
        interval_s = SITE_INTERVAL_S if is_far else HEARTBEAT_S
        heartbeat = Heartbeat(
            process_id=site.worker_id,
            epoch=1,
            sequence_number=site.step,
            roles=("decode",) if isinstance(site, Decode) else ("prefill",),
            state="ready",
            interval_s=interval_s,
            load=load,
            model=CARD_OF_CASE,
        )
        self._health.observe(heartbeat, now)
        self._workers.on_heartbeat(heartbeat, now)
        wait_s = self._random.random() * interval_s if is_first else interval_s
        self._later(wait_s, self._beat, site)
        if self._is_blocked:
            self._is_blocked = False
            self._dispatch()

    def _ended(self, now: float, job: Job) -> None:
        super()._ended(now, job)
        ttft_s = job.first_token_at - job.submitted_at
        limit_s = 5.0 + 2 * H20.prefill_s(job.trace.input_length)
        self.num_good += ttft_s <= limit_s and self.outcome.tpot_s[-1] <= MAX_TPOT_S
