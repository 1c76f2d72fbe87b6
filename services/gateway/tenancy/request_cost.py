"""What one request asks of its tenant's limits, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.tenancy.errors import ExceedsLimit, LimitIsZero
from shared.tenancy.tenant import LIMITS, TenantRecord


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What a request may take at most; `param`: the fields that ask for it."""

    num_input_tokens: int
    num_output_tokens: int
    input_param: str = "messages"
    output_param: str = "max_tokens"

    @property
    def costs(self) -> dict[str, int]:
        return {
            "requests_per_min": 1,
            "input_tokens_per_min": self.num_input_tokens,
            "output_tokens_per_min": self.num_output_tokens,
        }


@dataclass(frozen=True, slots=True)
class LimitLease:
    """One request that was let in. `is_charged`: by Redis. `headers`: how the limits stand."""

    tenant: TenantRecord
    lease_id: str
    request_cost: RequestCost
    is_charged: bool
    headers: Mapping[str, str]


def check_zeros(tenant: TenantRecord) -> None:
    """Raises LimitIsZero."""
    for name in LIMITS:
        if getattr(tenant, name) == 0:
            raise LimitIsZero(
                f"this tenant's limit {name} is 0: requests are disabled for this tenant"
            )


def check_size(tenant: TenantRecord, request_cost: RequestCost) -> None:
    """Raises ExceedsLimit for what would never be let in."""
    params = {
        "input_tokens_per_min": request_cost.input_param,
        "output_tokens_per_min": request_cost.output_param,
    }
    for name, param in params.items():
        limit, cost = getattr(tenant, name), request_cost.costs[name]
        if limit is not None and cost > limit:
            raise ExceedsLimit(
                f"{param}: this request may take {cost} of {name}, and this tenant has {limit}",
                param=param,
            )
