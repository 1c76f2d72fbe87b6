"""The cost of one request under its tenant's limits, and the lease that admits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.tenancy.errors import ExceedsLimit, LimitIsZero
from shared.tenancy.tenant import LIMITS, TenantRecord


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The maximum cost of a request. `input_param` and `output_param` are the request fields that
    determine it.
    """

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


UNKNOWN_COST = RequestCost(0, 0)  # the cost of a request whose body has not been read


@dataclass(frozen=True, slots=True)
class LimitLease:
    """The lease of one admitted request. `is_charged` is true if Redis charged it. `headers`
    describe the state of the limits.
    """

    tenant: TenantRecord
    lease_id: str
    request_cost: RequestCost
    is_charged: bool
    headers: Mapping[str, str]


def check_zeros(tenant: TenantRecord) -> None:
    """Raises LimitIsZero if any limit of the tenant is 0."""
    for name in LIMITS:
        if getattr(tenant, name) == 0:
            raise LimitIsZero(
                f"this tenant's limit {name} is 0: requests are disabled for this tenant"
            )


def has_token_limit(tenant: TenantRecord) -> bool:
    return tenant.input_tokens_per_min is not None or tenant.output_tokens_per_min is not None


def check_size(tenant: TenantRecord, request_cost: RequestCost) -> None:
    """Raises ExceedsLimit for a request that can never be admitted."""
    params = {
        "input_tokens_per_min": request_cost.input_param,
        "output_tokens_per_min": request_cost.output_param,
    }
    for name, param in params.items():
        limit, cost = getattr(tenant, name), request_cost.costs[name]
        if limit is not None and cost > limit:
            raise ExceedsLimit(
                f"{param}: this request may use {cost} of {name}, this tenant's limit is {limit}",
                param=param,
            )
