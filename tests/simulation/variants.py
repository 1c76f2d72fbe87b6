"""Plans in which workers have what the drawn ones have not: groups of layers, groups of ranks.

They are derived from drawn plans, so that seeds of those keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from shared.kv_layout import Reach, Window
from shared.lifecycle.worker_roles import BOTH
from shared.messages import WorkerRole
from tests.simulation.plan import BLOCK_SIZE, Fault, FaultKind, FleetPlan, Plan

REACHES: tuple[tuple[Reach, ...], ...] = (
    (None, Window(40)),
    (Window(7), None, Window(33), Window(64)),
)
EXECUTORS = ((2, 1), (2, 2), (3, 3), (1, 1))  # steps in flight, stages
ROLES: tuple[tuple[WorkerRole, ...], ...] = (("prefill",), ("decode",), BOTH)
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


def _as_drawn(plan: Plan) -> Plan:
    return plan


VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "drawn": _as_drawn,
    "layer-groups": with_layer_groups,
    "rank-groups": with_rank_groups,
    "role-changes": with_role_changes,
}
