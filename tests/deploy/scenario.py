"""What a fault of a cluster is made of."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.running import TIMING_STEP_S, WORKERS
from tests.support.cluster.chaos_cluster import ChaosCluster

STREAM_TOKENS = 4000  # more than a stream gets within a scenario

Step = Callable[[ChaosCluster], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Scenario:
    """`lasts_s`: from the fault until all its alerts are raised, with the rules' own `for`; until
    then a gateway is scraped every `interval_s`.

    `is_live`: a Prometheus shall raise the alerts too, each time that the clients are tested: that
    has no time for all. `stream_tokens`: how long the streams are that are open meanwhile; 0: there
    are none. The other fields are of the cluster. `environ_of`: further variables, by process.
    `metrics_ports`: processes whose own metrics are recorded too, and their ports. `unread_logs`:
    processes whose log is a pipe that nobody reads.
    """

    name: str
    alerts: tuple[str, ...]
    lasts_s: float
    cause: Step
    repair: Step
    interval_s: int = 5
    is_live: bool = False
    stream_tokens: int = STREAM_TOKENS
    step_s: float = TIMING_STEP_S
    worker_options: Mapping[str, str] = field(default_factory=lambda: WORKERS)
    scheduler_options: Mapping[str, str] = field(default_factory=dict)
    environ_of: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    metrics_ports: Mapping[str, int] = field(default_factory=dict)
    unread_logs: tuple[str, ...] = ()
