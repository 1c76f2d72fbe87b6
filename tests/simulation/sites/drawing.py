"""Creates a plan of linked sites from a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID, StepCost
from shared.messages import SamplingParams
from tests.simulation.plan import (
    BLOCK_SIZE,
    PATIENT_S,
    TENANTS,
    Fault,
    FaultKind,
    FleetPlan,
    Plan,
    RequestPlan,
)
from tests.simulation.sites.plan import Lie, LinkFault, LinkFaultKind, SitesPlan

REGIONS = ("eu", "us")
PROCESS_FAULTS: tuple[FaultKind, ...] = (*("kill", "freeze", "cut_off", "nats_restart", "noise"),)
NUM_BLOCKS = (8, 16, 32)


def sites_plan_of(seed: int) -> SitesPlan:
    random = Random(seed)
    names = ("a", "b", "c")[: random.choice((2, 2, 3))]
    regions = {name: random.choice(REGIONS) for name in names}
    has_workers = dict.fromkeys(names, True)
    has_workers[names[0]] = random.random() < 0.8
    is_busy = {name: random.random() < 0.5 for name in names}
    is_busy[names[0]] = True
    cost = StepCost(base_s=random.choice((0.005, 0.02)), per_token_s=random.choice((20e-6, 2e-3)))
    faults = _link_faults(random, names)
    has_process_faults = random.random() < 0.3
    dying = random.choice(names) if random.random() < 0.15 else None
    sites = {
        name: _site(
            random,
            seed,
            name,
            cost,
            tuple(dict.fromkeys((regions[name], *regions.values()))),
            has_workers=has_workers[name],
            is_busy=is_busy[name],
            has_faults=has_process_faults,
        )
        for name in names
    }
    if dying is not None:
        sites[dying] = replace(sites[dying], faults=_death(random, sites[dying].fleet))
    return SitesPlan(
        seed=seed,
        sites=sites,
        regions=regions,
        delay_s=random.choice((0.001, 0.02, 0.1)),
        faults=faults,
        lie=random.choice((None, None, None, *get_args(Lie))),
    )


def _site(
    random: Random,
    seed: int,
    name: str,
    cost: StepCost,
    regions: tuple[str, ...],
    *,
    has_workers: bool,
    is_busy: bool,
    has_faults: bool,
) -> Plan:
    fleet = _fleet(random, cost, has_workers=has_workers)
    count = random.randint(6, 12) if is_busy else random.randint(0, 3)
    requests = tuple(_request(random, f"{name}{index}", fleet, regions) for index in range(count))
    count = random.choice((0, 1, 2)) if has_faults else 0
    faults = tuple(_fault(random, fleet) for _ in range(count))
    return Plan(seed=seed * 8 + ord(name), fleet=fleet, requests=requests, faults=faults)


def _fleet(random: Random, cost: StepCost, *, has_workers: bool) -> FleetPlan:
    is_split = random.random() < 0.3
    return FleetPlan(
        num_gateways=random.choice((1, 1, 2)),
        num_schedulers=random.choice((1, 1, 2)),
        num_indices=random.choice((0, 1)),
        num_prefill=int(has_workers and is_split),
        num_decode=int(has_workers and is_split),
        num_both=random.choice((1, 1, 2)) if has_workers and not is_split else 0,
        num_blocks=random.choice(NUM_BLOCKS),
        max_batch_tokens=48,
        max_sequences=random.choice((2, 8)),
        cost=cost,
        copy_s=0.0,
        max_queued_requests=100,
    )


def _request(
    random: Random, request_id: str, fleet: FleetPlan, regions: tuple[str, ...]
) -> RequestPlan:
    """The longest one fits a worker of any site. One that is bound may be in the first region,
    its gateway's.
    """
    longest = min(NUM_BLOCKS) * BLOCK_SIZE // 2
    plan = RequestPlan(
        request_id=request_id,
        at_s=round(random.choice((0.5, random.uniform(0.5, 6.0))), 3),
        tenant_id=random.choice(TENANTS[:2]),
        prompt=tuple(
            random.randrange(FIRST_TOKEN_ID, 32_000) for _ in range(random.randint(1, longest))
        ),
        num_choices=random.choice((1, 1, 1, 2)),
        sampling=SamplingParams(
            seed=random.getrandbits(64),
            max_tokens=random.choice((1, 12, 30, 60)),
            temperature=random.choice((0.0, 1.0)),
            num_logprobs=random.choice((None, None, 1)),
        ),
        deadline_s=random.choice((PATIENT_S, PATIENT_S, PATIENT_S, 2.0)),
        pooling=None,
        stop_modulus=random.choice((0, 0, 0, 5)),
        leaves_after_s=random.choice((None, None, None, random.uniform(0.0, 2.0))),
    )
    bound = tuple(dict.fromkeys((regions[0], random.choice(regions))))
    return replace(plan, regions=random.choice(((), (), bound)))


def _link_faults(random: Random, names: tuple[str, ...]) -> tuple[LinkFault, ...]:
    count = random.choice((0, 1, 1, 2, 4))
    faults = (link_fault(random, names) for _ in range(count))
    return tuple(sorted(faults, key=lambda each: (each.at_s, each.kind, each.first)))


def link_fault(random: Random, names: tuple[str, ...], before_s: float = 6.0) -> LinkFault:
    first, second = random.sample(names, 2)
    return LinkFault(
        at_s=round(random.uniform(0.0, before_s), 3),
        kind=random.choice(get_args(LinkFaultKind)),
        first=first,
        second=second,
        duration_s=random.choice((0.1, 1.0, random.uniform(1.0, 8.0))),
        delay_s=random.choice((0.3, 1.5)),
        is_lost=random.random() < 0.5,
    )


def _fault(random: Random, fleet: FleetPlan) -> Fault:
    kind = random.choice(PROCESS_FAULTS)
    every = [process_id for ids in fleet.process_ids.values() for process_id in ids]
    return Fault(
        at_s=round(random.uniform(0.5, 5.0), 3),
        kind=kind,
        target="" if kind in ("nats_restart", "noise") else random.choice(every),
        duration_s=random.choice((0.2, 1.0, 3.0)),
        amount=random.choice((0.02, 0.1, 0.4)),
    )


def _death(random: Random, fleet: FleetPlan) -> tuple[Fault, ...]:
    """All processes of a site die at once, and may come back."""
    at_s, comes_back = round(random.uniform(0.5, 5.0), 3), random.random() < 0.5
    return tuple(
        Fault(at_s=at_s, kind="kill", target=each, duration_s=3.0, comes_back=comes_back)
        for ids in fleet.process_ids.values()
        for each in ids
    )
