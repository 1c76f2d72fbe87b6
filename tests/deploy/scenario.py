"""What a fault of a cluster is made of."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.world.cluster import ChaosCluster

Step = Callable[[ChaosCluster], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Scenario:
    """`lasts_s`: from the fault until all its alerts are raised, with the rules' own `for`.

    `environ`: further variables of the gateways.
    """

    name: str
    alerts: tuple[str, ...]
    lasts_s: float
    cause: Step
    repair: Step
    environ: Mapping[str, str] = field(default_factory=dict)
