"""Declares a dialect of the API: a folder has one, and `dialects/dialect_table.py` lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from litestar.handlers import HTTPRouteHandler

from services.gateway.dialects.http_parts import HttpParts
from services.gateway.models.gateway_models import GatewayModels
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.receipts.receipts import Receipts
from services.gateway.receipts.site_receipts import SiteReceipts
from services.gateway.request.endpoint import Endpoint, EndpointState
from services.gateway.request.preparer import Preparer
from services.gateway.tenancy.tenancy import Tenancy
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob, PreparedBody
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.errors import HearthError
from shared.lifecycle.heartbeat import HealthMonitor
from shared.pixels.pixel_holder import PixelHolder
from shared.randomness import Randomness
from shared.tenancy.tenant import TenantRecord

# error, id of the request → the HTTP status and the body
EncodeError = Callable[[HearthError, str], tuple[int, Any]]
# in a preparation process; raises InvalidRequest and its subclasses
Job = Callable[[BodyJob, ModelFiles, ChatTemplate | None], PreparedBody]
# tenant, body → body of the response; raises the HearthError that rejects the request
Answer = Callable[[TenantRecord, bytes], Awaitable[bytes]]
Answers = Mapping[str, Answer]  # by the names of their endpoints
Handlers = list[HTTPRouteHandler]
REQUEST_ID = "x-request-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectParts:
    """Parts of the gateway that each dialect is opened with. `wall_clock`: seconds since 1970."""

    config: GatewayConfig
    tenancy: Tenancy
    models: GatewayModels
    preparer: Preparer
    pixels: PixelHolder
    health_monitor: HealthMonitor
    metrics: GatewayMetrics
    telemetry: RequestTelemetry
    receipts: Receipts
    site_receipts: SiteReceipts
    clock: Clock
    wall_clock: Callable[[], float]
    randomness: Randomness


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDialect:
    """A dialect in one gateway, with its state.

    `answers`: the functions of endpoints that do not generate, by the endpoints' names. `states`:
    the states of endpoints that generate, by their names. `handlers`: makes the HTTP handlers of
    routes that no endpoint declares. `tasks`: coroutines that run as long as the gateway. `stop`:
    ends what the requests have started.
    """

    answers: Answers = field(default_factory=dict)
    states: Mapping[str, EndpointState] = field(default_factory=dict)
    handlers: Callable[[HttpParts], Handlers] = lambda _: []
    tasks: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
    stop: Callable[[], Awaitable[None]] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Declares what is particular to the clients of one API.

    `name`: in metrics. `title`, `about`: in the OpenAPI document, for all of its routes. `owns`:
    whether the errors of a path have this form and count under this name. `error`: the type of what
    `encode_error` returns. `request_id_headers`: the headers of each response that hold the id of
    its request. `jobs`: large bodies that preparation processes take besides those of endpoints
    that generate, by their kind. `open`: makes what the dialect needs in one gateway.
    """

    name: str
    title: str = ""
    about: str = ""
    endpoints: tuple[Endpoint, ...]
    encode_error: EncodeError
    error: type[Any]
    owns: Callable[[str], bool] = lambda _: False
    request_id_headers: tuple[str, ...] = (REQUEST_ID,)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    open: Callable[[DialectParts], OpenDialect] = lambda _: OpenDialect()
