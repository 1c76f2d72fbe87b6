"""Draws a run from a seed: requests of all tenants, changes of their regions, and faults."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID, StepCost
from shared.messages import SamplingParams
from tests.simulation.plan import PATIENT_S, Fault, FleetPlan, Plan, RequestPlan
from tests.simulation.residency.plan import (
    PLANTED,
    REGIONS,
    Change,
    ResidencyPlan,
    TenantPlan,
    all_tenants,
    limits_of,
)
from tests.simulation.sites.drawing import link_fault
from tests.simulation.sites.plan import SitesPlan

REQUESTS_PER_S = 2500.0  # of all sites together, in virtual time
ANSWER_TOKENS = 4
CHANGED_SHARE = 0.05  # of the tenants, in each run
PREFIX_SHARE = 0.05
FAULTS_EACH_S = 2.0  # for each site, a process
LINK_FAULTS_EACH_S = 0.5
ANNEXES = ("worker-1",)  # a worker of each site that is in the region of the next one
FLEET = FleetPlan(
    num_gateways=1,
    num_schedulers=1,
    num_indices=1,
    num_prefill=1,
    num_decode=1,
    num_both=2,
    num_blocks=512,
    max_batch_tokens=2048,
    max_sequences=64,
    cost=StepCost(base_s=0.004, per_token_s=2e-6),
    copy_s=0.0,
    max_queued_requests=1000,
)
SMALL = replace(FLEET, num_blocks=24, max_sequences=4, cost=StepCost(base_s=0.02, per_token_s=2e-5))
SMALL_SHARE = 0.4  # of the sites, in each run: much of their work leaves them


def residency_plan_of(seed: int, num_requests: int) -> ResidencyPlan:
    random, tenants = Random(f"residency {seed}"), all_tenants()
    names = [each for each in tenants if each != PLANTED]
    lasts_s = num_requests / REQUESTS_PER_S
    requests: dict[str, list[RequestPlan]] = {site: [] for site in REGIONS}
    for number in range(num_requests):
        tenant = tenants[random.choice(names)]
        requests[tenant.home].append(_request(random, tenant, number, lasts_s))
    num_faults = round(lasts_s / LINK_FAULTS_EACH_S)
    faults = [link_fault(random, tuple(REGIONS), lasts_s) for _ in range(num_faults)]
    sites = SitesPlan(
        seed=seed,
        sites={site: _site(random, seed, site, requests[site], lasts_s) for site in REGIONS},
        regions=REGIONS,
        delay_s=0.02,
        faults=tuple(sorted(faults, key=lambda each: each.at_s)),
    )
    changed = random.sample(names, round(CHANGED_SHARE * len(names)))
    changes = [_change(random, tenants[each], lasts_s) for each in changed]
    return ResidencyPlan(
        sites=sites,
        tenants=tenants,
        changes=tuple(sorted(changes, key=lambda each: each.at_s)),
        prefixes=tuple(random.sample(names, round(PREFIX_SHARE * len(names)))),
    )


def _site(
    random: Random, seed: int, site: str, requests: list[RequestPlan], lasts_s: float
) -> Plan:
    names, regions = sorted(REGIONS), list(REGIONS.values())
    annex = regions[(names.index(site) + 1) % len(names)]
    num_faults = round(lasts_s / FAULTS_EACH_S)
    return Plan(
        seed=seed * 8 + names.index(site),
        fleet=replace(
            SMALL if random.random() < SMALL_SHARE else FLEET,
            regions=dict.fromkeys(ANNEXES, annex),
        ),
        requests=tuple(requests),
        faults=tuple(_fault(random, lasts_s) for _ in range(num_faults)),
    )


def _request(random: Random, tenant: TenantPlan, number: int, lasts_s: float) -> RequestPlan:
    """Half of the prompts are the stem alone, whose answer is known; others go on."""
    num_more = random.choice((0, random.randint(1, 24)))
    more = tuple(random.randrange(FIRST_TOKEN_ID, 32_000) for _ in range(num_more))
    return RequestPlan(
        request_id=f"{tenant.tenant_id}.{number}",
        at_s=round(random.uniform(0.0, lasts_s), 4),
        tenant_id=tenant.tenant_id,
        prompt=tenant.stem + more,
        num_choices=1,
        sampling=SamplingParams(seed=1, max_tokens=ANSWER_TOKENS, temperature=0.0),
        deadline_s=PATIENT_S,
        pooling=None,
        stop_modulus=0,
        leaves_after_s=None,
    )


def _change(random: Random, tenant: TenantPlan, lasts_s: float) -> Change:
    region = random.choice(tuple(REGIONS.values()))
    at_s = round(random.uniform(0.0, lasts_s), 3)
    return Change(at_s, tenant.tenant_id, limits_of(random, region))


def _fault(random: Random, lasts_s: float) -> Fault:
    every = [each for ids in FLEET.process_ids.values() for each in ids]
    return Fault(
        at_s=round(random.uniform(0.5, lasts_s), 3),
        kind=random.choice(("kill", "freeze", "cut_off")),
        target=random.choice(every),
        duration_s=random.choice((0.2, 1.0, 3.0)),
    )
