"""The residency policy of a configuration."""

from __future__ import annotations

from services.scheduler.residency.demand_policy import DemandPolicy
from services.scheduler.residency.lru_policy import LruPolicy
from services.scheduler.residency.view import Policy
from shared.config import SchedulerConfig


def policy_of(config: SchedulerConfig) -> Policy:
    if config.residency == "lru":
        return LruPolicy()
    return DemandPolicy(ttft_target_s=config.wake_ttft_s)
