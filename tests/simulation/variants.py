"""Plans in which workers have what the drawn ones have not: groups of layers, groups of ranks.

They are derived from drawn plans, so that seeds of those keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from shared.kv_layout import Reach, Window
from tests.simulation.plan import Fault, FaultKind, Plan

REACHES: tuple[tuple[Reach, ...], ...] = (
    (None, Window(40)),
    (Window(7), None, Window(33), Window(64)),
)
EXECUTORS = ((2, 1), (2, 2), (3, 3), (1, 1))  # steps in flight, stages
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


def _as_drawn(plan: Plan) -> Plan:
    return plan


VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "drawn": _as_drawn,
    "layer-groups": with_layer_groups,
    "rank-groups": with_rank_groups,
}
