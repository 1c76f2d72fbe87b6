"""The HTTP application: the routes of all dialects, and those of operators."""

from __future__ import annotations

from litestar import HttpMethod, Litestar, route
from litestar.handlers import HTTPRouteHandler

from services.gateway.dialects.admission import Admission
from services.gateway.dialects.endpoint_handlers import handlers_of
from services.gateway.dialects.error_response import ErrorResponses
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.transport_parts import TransportParts
from services.gateway.http.cors import cors_config
from services.gateway.http.openapi import SECURITY
from services.gateway.http.server import probes_alone
from services.gateway.operator.operator_routes import OperatorRoutes
from services.gateway.reference.reference import OPERATION, Reference
from shared.config import GatewayConfig
from shared.lifecycle.release import installed_release


def build_app(config: GatewayConfig, parts: TransportParts, operator: OperatorRoutes) -> Litestar:
    http = HttpParts(
        submission=parts.submission,
        clock=parts.clock,
        keep_alive_s=config.keep_alive_s,
        options={"middleware": [Admission(parts).middleware], "security": SECURITY},
    )
    reference = Reference(parts.dialects.declared)
    openapi = route(
        "/openapi.json", http_method=[HttpMethod.GET, HttpMethod.HEAD], include_in_schema=False
    )
    return Litestar(
        [
            *(
                each
                for pair in parts.dialects
                for each in _tagged(handlers_of(*pair, http), pair[0].title or pair[0].name)
            ),
            *_tagged(operator.handlers(parts.dialects.default.error), OPERATION.name),
            openapi(reference.openapi),
        ],
        exception_handlers=ErrorResponses(parts).handlers,
        openapi_config=reference.config(installed_release()),
        cors_config=cors_config(config.cors_origin),
        middleware=[probes_alone],
        request_max_body_size=config.max_body_bytes,
        logging_config=None,
    )


def _tagged(handlers: list[HTTPRouteHandler], tag: str) -> list[HTTPRouteHandler]:
    """Returns the handlers, which the OpenAPI document groups under the tag."""
    for each in handlers:
        each.tags = [tag]
    return handlers
