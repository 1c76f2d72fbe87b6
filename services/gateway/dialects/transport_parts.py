"""The parts of a gateway that its transports share, HTTP and NATS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.gateway.body_budget import BodyBudget
from services.gateway.dialects.open_dialects import OpenDialects
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.request.submission import Submission
from services.gateway.tenancy.api_keys import ApiKeys
from shared.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportParts:
    """`budget`: counts the bytes of bodies. `max_body_bytes`: of one body. `max_image_body_bytes`:
    returns that of bodies with images; 0 while no model takes any.
    """

    dialects: OpenDialects
    submission: Submission
    api_keys: ApiKeys
    metrics: GatewayMetrics
    max_body_bytes: int
    clock: Clock
    new_request_id: Callable[[], str]
    budget: BodyBudget = field(default_factory=BodyBudget)
    max_image_body_bytes: Callable[[], int] = lambda: 0

    def body_limit(self, *, takes_images: bool) -> int:
        """Returns the limit of a body of an endpoint."""
        return max(self.max_body_bytes, self.max_image_body_bytes() if takes_images else 0)
