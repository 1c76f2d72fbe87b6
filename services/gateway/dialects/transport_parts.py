"""The parts of a gateway that its transports share, HTTP and NATS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.gateway.dialects.open_dialects import OpenDialects
from services.gateway.http.body_budget import BodyBudget
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.request.submission import Submission
from services.gateway.tenancy.api_keys import ApiKeys
from shared.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportParts:
    """`budget`: counts the bytes of bodies. `max_body_bytes`: of one body."""

    dialects: OpenDialects
    submission: Submission
    api_keys: ApiKeys
    metrics: GatewayMetrics
    max_body_bytes: int
    clock: Clock
    new_request_id: Callable[[], str]
    budget: BodyBudget = field(default_factory=BodyBudget)
