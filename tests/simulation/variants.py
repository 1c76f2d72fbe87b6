"""Plans in which workers have what the drawn ones have not: groups of layers, groups of ranks,
hosts that start, wake and park them.

They are derived from drawn plans, so that seeds of those keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID
from shared.kv_layout import Reach, Window
from shared.lifecycle.worker_roles import BOTH
from shared.messages import WorkerRole
from tests.simulation.plan import (
    BLOCK_SIZE,
    POISON,
    UNDISTURBED_S,
    Fault,
    FaultKind,
    FleetPlan,
    HostedPlan,
    Plan,
)

REACHES: tuple[tuple[Reach, ...], ...] = (
    (None, Window(40)),
    (Window(7), None, Window(33), Window(64)),
)
EXECUTORS = ((2, 1), (2, 2), (3, 3), (1, 1))  # steps in flight, stages
ROLES: tuple[tuple[WorkerRole, ...], ...] = (("prefill",), ("decode",), BOTH)
HOST_FAULTS: tuple[FaultKind, ...] = (
    *("kill", "kill", "freeze", "wake_hangs", "dies_after_wake", "model_removed"),
)
LOSSES: tuple[FaultKind, ...] = ("rank_killed", "rank_frozen")


def with_layer_groups(plan: Plan) -> Plan:
    """The model's layers form several groups, of which some see only the last keys."""
    return replace(plan, fleet=replace(plan.fleet, reaches=REACHES[plan.seed % len(REACHES)]))


def with_rank_groups(plan: Plan) -> Plan:
    """Every worker is a group of ranks, and every second plan loses some of their ranks."""
    random, workers = Random(plan.seed), plan.fleet.worker_ids
    groups = {each: random.choice(EXECUTORS) for each in workers}
    losses = [
        Fault(at_s=random.uniform(0.0, 4.0), kind=random.choice(LOSSES), target=worker)
        for worker in random.sample(workers, min(len(workers), random.choice((1, 2, 3))))
    ]
    faults = plan.faults if plan.seed % 2 else tuple(losses)
    return replace(plan, fleet=replace(plan.fleet, groups=groups), faults=faults)


def with_role_changes(plan: Plan) -> Plan:
    """Workers with both handlers change their roles at any moment, by an operator and by the
    schedulers, and every second plan has its other faults too. One worker always decodes.
    """
    random, fleet = Random(plan.seed), _with_two_more(plan.fleet)
    changes = [
        Fault(
            at_s=random.uniform(0.0, 4.0),
            kind="change_roles",
            target=random.choice(fleet.process_ids["worker"]),
            roles=random.choice(ROLES),
        )
        for _ in range(random.randint(2, 10))
    ]
    others = plan.faults if plan.seed % 2 else ()
    return replace(plan, fleet=fleet, faults=(*others, *changes))


def _with_two_more(fleet: FleetPlan) -> FleetPlan:
    larger = replace(
        fleet,
        num_decode=max(1, fleet.num_decode),
        num_both=fleet.num_both + 2,
        has_automatic_roles=True,
    )
    pools, blocks = fleet.pool_sizes, fleet.block_sizes
    added = dict.fromkeys(larger.worker_ids, fleet.num_blocks)
    sizes = dict.fromkeys(larger.worker_ids, BLOCK_SIZE)
    return replace(
        larger,
        pool_sizes=None if pools is None else {**added, **pools},
        block_sizes=None if blocks is None else {**sizes, **blocks},
    )


def with_hosts(plan: Plan) -> Plan:
    """Two or three hosts serve several models, and have memory for few hot ones. Hosts die, wakes
    never end, workers die when they have been woken, models leave the model registry and come back.
    """
    random = Random(plan.seed)
    models = tuple(f"m{index}" for index in range(random.choice((2, 3, 5))))
    hosted = HostedPlan(
        num_hosts=random.choice((1, 2, 3)),
        models=models,
        num_resident=random.choice((len(models), len(models), max(2, len(models) - 1))),
        num_hot=random.choice((1, 2)),
        wake_s=random.choice((0.05, 0.25)),
        start_s=random.choice((0.5, 2.0)),
    )
    fleet = replace(
        plan.fleet,
        **{"hosted": hosted, "num_prefill": 0, "num_decode": 0, "num_both": 0},
        **{"num_schedulers": random.choice((1, 2, 2)), "max_queued_requests": 100},
        **{"pool_sizes": None, "block_sizes": None, "delays_s": {}, "regions": {}},
        **{"unlike": (), "capable": (), "changing": ()},
    )
    requests = tuple(
        replace(
            each,
            needs=(),
            model=random.choice(models),
            prompt=_without_poison(each.prompt),
            deadline_s=random.choice((each.deadline_s, UNDISTURBED_S)),
        )
        for each in plan.requests
    )
    count = random.choice((0, 1, 1, 2, 4))
    faults = tuple(_host_fault(random, hosted) for _ in range(count))
    faults = tuple(sorted(faults, key=lambda each: (each.at_s, each.kind, each.target)))
    return replace(plan, fleet=fleet, requests=requests, faults=faults)


def _host_fault(random: Random, hosted: HostedPlan) -> Fault:
    kind = random.choice(HOST_FAULTS)
    hosts = [f"host-{index}" for index in range(hosted.num_hosts)]
    return Fault(
        at_s=round(random.uniform(0.0, 4.0), 3),
        kind=kind,
        target=random.choice(hosted.models if kind == "model_removed" else hosts),
        duration_s=random.choice((0.2, 1.0, 3.0)),
    )


def _without_poison(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(FIRST_TOKEN_ID if each == POISON else each for each in prompt)


def _as_drawn(plan: Plan) -> Plan:
    return plan


VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "drawn": _as_drawn,
    "layer-groups": with_layer_groups,
    "rank-groups": with_rank_groups,
    "role-changes": with_role_changes,
    "models": with_hosts,
}
