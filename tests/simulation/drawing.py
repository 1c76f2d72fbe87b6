"""Creates a plan from a seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import msgspec

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID, StepCost
from shared.messages import SamplingParams
from tests.simulation.checks.expected import expected_choice, states_of
from tests.simulation.plan import (
    BLOCK_SIZE,
    DEMO,
    PATIENT_S,
    POISON,
    TENANTS,
    Fault,
    FaultKind,
    FleetPlan,
    Plan,
    RequestPlan,
)

LAST_FAULT_S = 6.0
MAX_ONE_WAY_S = 0.3  # between two regions
_REGIONS = ("", "near", "far")


def plan_of(seed: int) -> Plan:
    random = Random(seed)
    fleet = _fleet(random)
    requests = _requests(random, fleet)
    faults = _faults(random, fleet)
    fleet, requests = _uneven(random, fleet), _poisoned(random, requests)
    fleet, requests = _mixed(random, fleet, requests)
    return Plan(seed=seed, fleet=fleet, requests=requests, faults=faults)


def _fleet(random: Random) -> FleetPlan:
    num_both = random.choice((0, 0, 0, 1))
    return FleetPlan(
        num_gateways=random.choice((1, 1, 1, 2)),
        num_schedulers=random.choice((1, 2, 2)),
        num_indices=random.choice((0, 1, 1)),
        num_prefill=random.choice((0, 1, 1, 2, 2)),
        num_decode=random.choice((1, 2, 2)) if not num_both else random.choice((0, 1, 2)),
        num_both=num_both,
        num_blocks=random.choice((16, 32, 64)),
        max_batch_tokens=random.choice((16, 48, 128)),
        max_sequences=random.choice((2, 8, 32)),
        cost=StepCost(
            base_s=random.choice((0.005, 0.02, 0.05)),
            per_token_s=random.choice((20e-6, 500e-6, 5e-3, 20e-3)),
        ),
        copy_s=random.choice((0.0, 0.0005, 0.02)),
        max_queued_requests=random.choice((2, 100, 100, 100)),
    )


def _uneven(random: Random, fleet: FleetPlan) -> FleetPlan:
    """Sometimes workers of several sizes, regions far from each other, or unlike devices."""
    workers = fleet.worker_ids
    if random.random() < 1 / 8:
        num = fleet.num_blocks
        fleet = replace(
            fleet,
            pool_sizes={each: random.choice((num // 4, num, 4 * num)) for each in workers},
            block_sizes=random.choice((None, _block_sizes(random, workers))),
        )
    if random.random() < 1 / 8:
        processes = [process_id for ids in fleet.process_ids.values() for process_id in ids]
        fleet = replace(
            fleet,
            regions={each: random.choice(_REGIONS) for each in processes},
            delays_s={pair: _one_way_s(random) for pair in combinations(_REGIONS, 2)},
        )
    if random.random() < 1 / 10:
        fleet = replace(fleet, unlike=tuple(each for each in workers if random.random() < 0.5))
    return fleet


def _block_sizes(random: Random, workers: list[str]) -> dict[str, int]:
    return {each: random.choice((BLOCK_SIZE, BLOCK_SIZE, 2 * BLOCK_SIZE)) for each in workers}


def _one_way_s(random: Random) -> float:
    return random.choice((0.0, 0.02, random.uniform(0.0, MAX_ONE_WAY_S)))


def _poisoned(random: Random, requests: tuple[RequestPlan, ...]) -> tuple[RequestPlan, ...]:
    """Sometimes adds a token to one prompt for which every step raises."""
    if random.random() >= 1 / 20:
        return requests
    number = random.randrange(len(requests))
    plan = requests[number]
    at = random.randrange(len(plan.prompt))
    prompt = (*plan.prompt[:at], POISON, *plan.prompt[at + 1 :])
    return (*requests[:number], replace(plan, prompt=prompt), *requests[number + 1 :])


def _mixed(
    random: Random, fleet: FleetPlan, requests: tuple[RequestPlan, ...]
) -> tuple[FleetPlan, tuple[RequestPlan, ...]]:
    """Sometimes workers of several releases, some of them without what some requests need."""
    if random.random() >= 1 / 6:
        return fleet, requests
    workers = fleet.worker_ids
    fleet = replace(
        fleet,
        capable=tuple(each for each in workers if random.random() < 0.6),
        changing=tuple(each for each in workers if random.random() < 0.3),
    )
    return fleet, tuple(
        replace(each, needs=DEMO) if random.random() < 0.6 else each for each in requests
    )


def _requests(random: Random, fleet: FleetPlan) -> tuple[RequestPlan, ...]:
    longest = min(fleet.num_blocks * BLOCK_SIZE // 2, int(2.0 / fleet.cost.per_token_s))
    stems = [_tokens(random, random.randint(BLOCK_SIZE, longest // 2)) for _ in range(2)]
    plans: list[RequestPlan] = []
    is_burst = random.random() < 0.15
    for index in range(random.randint(6, 12) if is_burst else random.randint(2, 7)):
        stem = random.choice([(), *stems])
        own = _tokens(random, random.choice((1, 3, random.randint(1, longest - len(stem)))))
        plan = RequestPlan(
            request_id=f"r{index}",
            at_s=1.0 if is_burst else round(random.uniform(0.0, 3.0), 3),
            tenant_id=random.choice(TENANTS[:2]),
            prompt=(*stem, *own),
            num_choices=random.choice((1, 1, 1, 2, 3)),
            sampling=_sampling(random),
            pooling=None,
            deadline_s=random.choice((PATIENT_S, PATIENT_S, PATIENT_S, 0.3, 2.0)),
            stop_modulus=random.choice((0, 0, 0, 5)),
            leaves_after_s=random.choice((None, None, None, random.uniform(0.0, 2.0))),
        )
        plans.append(_embedding(random, plan) or _with_stop_token(random, plan))
    return tuple(plans)


def _embedding(random: Random, plan: RequestPlan) -> RequestPlan | None:
    """Sometimes requests an embedding of the prompt instead of an answer."""
    if random.random() < 0.85:
        return None
    pooling = random.choice(("last", "mean"))
    return replace(
        plan, pooling=pooling, num_choices=1, sampling=SamplingParams(seed=0, max_tokens=1)
    )


def _sampling(random: Random) -> SamplingParams:
    is_plain = random.random() < 0.6
    return SamplingParams(
        seed=random.getrandbits(64),
        max_tokens=random.choice((1, 4, 12, 30, 60)),
        temperature=random.choice((0.0, 0.0, 1.0)),
        frequency_penalty=0.0 if is_plain else random.choice((0.0, 0.5)),
        repetition_penalty=1.0 if is_plain else random.choice((1.0, 1.3)),
        logit_bias=() if is_plain else random.choice(((), ((77, 1.5),))),
        min_tokens=0 if is_plain else random.choice((0, 3)),
        num_logprobs=random.choice((None, None, None, 0, 2)),
        num_prompt_logprobs=None if is_plain else random.choice((None, None, 1)),
    )


def _with_stop_token(random: Random, plan: RequestPlan) -> RequestPlan:
    """Sometimes adds a stop token that the request will sample."""
    if random.random() < 0.8:
        return plan
    output = expected_choice(plan, 0, states_of(plan.prompt)[-1])
    stop_token_id = random.choice(output.token_ids)
    sampling = msgspec.structs.replace(plan.sampling, stop_token_ids=(stop_token_id,))
    return replace(plan, sampling=sampling)


def _tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(FIRST_TOKEN_ID, 32_000) for _ in range(count))


# ── faults ───────────────────────────────────────────────────────────────────────────────────────

_THEMES: tuple[tuple[FaultKind, ...], ...] = (
    (),
    ("kill",),
    ("freeze",),
    ("kill", "freeze"),
    ("noise", "deaf"),
    ("noise", "deaf", "kill", "freeze"),
    ("link_drop", "link_noise"),
    ("link_noise", "freeze"),
    ("link_drop", "link_noise", "kill", "freeze"),
    ("nats_restart", "nats_hang"),
    ("nats_restart", "nats_hang", "kill", "freeze", "cut_off"),
    ("wedge", "slow"),
    ("drain",),
    ("drain", "kill", "noise"),
    ("cut_off", "redis_away", "redis_hang"),
    ("runner_raises",),
    ("runner_raises", "kill", "freeze"),
    ("twin",),
    ("twin", "kill", "nats_restart"),
    (
        "kill", "freeze", "slow", "wedge", "drain", "cut_off",
        "nats_restart", "nats_hang", "redis_away", "redis_hang", "noise", "deaf", "link_drop",
        "link_noise", "runner_raises", "twin",
    ),
)  # fmt: skip


def _faults(random: Random, fleet: FleetPlan) -> tuple[Fault, ...]:
    theme = random.choice(_THEMES)
    if not theme:
        return ()
    count = random.choice((1, 1, 2, 3, 6))
    faults = [_fault(random, fleet, random.choice(theme)) for _ in range(count)]
    return tuple(sorted(faults, key=lambda each: (each.at_s, each.kind, each.target)))


def _fault(random: Random, fleet: FleetPlan, kind: FaultKind) -> Fault:
    all_process_ids = [process_id for ids in fleet.process_ids.values() for process_id in ids]
    workers = fleet.worker_ids
    at_s = round(random.uniform(0.0, 4.0), 3)
    short_s = random.choice((0.05, 0.4, random.uniform(0.5, 2.0)))
    match kind:
        case "kill" | "drain":
            return Fault(
                at_s=at_s,
                kind=kind,
                target=random.choice(all_process_ids),
                duration_s=random.choice((0.2, 1.0, 3.0)),
                comes_back=random.random() < 0.7,
            )
        case "freeze" | "cut_off":
            duration_s = random.choice((short_s, random.uniform(1.0, LAST_FAULT_S)))
            return Fault(
                at_s=at_s,
                kind=kind,
                target=random.choice(all_process_ids),
                duration_s=duration_s,
            )
        case "slow" | "wedge":
            return Fault(
                at_s=at_s,
                kind=kind,
                target=random.choice(workers),
                duration_s=random.uniform(0.5, LAST_FAULT_S),
                amount=random.choice((3.0, 10.0)),
            )
        case "nats_restart" | "nats_hang" | "redis_away" | "redis_hang":
            return Fault(at_s=at_s, kind=kind, duration_s=random.uniform(0.1, 4.0))
        case "deaf":
            return Fault(
                at_s=at_s,
                kind=kind,
                target=random.choice(all_process_ids),
                other=random.choice(all_process_ids),
                duration_s=random.uniform(0.5, LAST_FAULT_S),
            )
        case "noise" | "link_noise":
            return Fault(
                at_s=at_s,
                kind=kind,
                duration_s=random.uniform(1.0, LAST_FAULT_S),
                amount=random.choice((0.02, 0.1, 0.4)),
            )
        case "link_drop":
            return Fault(at_s=at_s, kind=kind, target=random.choice(workers))
        case "runner_raises":
            return Fault(
                at_s=at_s,
                kind=kind,
                target=random.choice(workers),
                duration_s=random.uniform(0.5, LAST_FAULT_S),
                amount=random.choice((0.1, 0.3, 1.0)),
            )
        case "twin":
            return Fault(at_s=at_s, kind=kind, target=random.choice(all_process_ids))
