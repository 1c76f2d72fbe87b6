"""The HTTP application: routes, error responses and the OpenAPI document."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
from litestar import (
    HttpMethod,
    Litestar,
    MediaType,
    Request,
    Response,
    Router,
    get,
    route,
)
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from prometheus_client import CONTENT_TYPE_LATEST

from services.gateway.dialects.admission import Admission
from services.gateway.dialects.dialect import Answers
from services.gateway.dialects.dialect_table import DIALECTS, dialect_of
from services.gateway.dialects.endpoint_handlers import EndpointHandlers, described
from services.gateway.dialects.error_response import error_response
from services.gateway.dialects.openai.errors import ErrorEnvelope
from services.gateway.dialects.paths import check_account, openai_paths
from services.gateway.dialects.prefixes.routes import PrefixRoutes
from services.gateway.dialects.prefixes.store import PrefixStore
from services.gateway.dialects.responses.routes import ResponsesRoutes
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.dialects.route_options import IS_FREE
from services.gateway.dialects.tokenization.routes import TokenizerInfoRoute
from services.gateway.dialects.tokenization.tokenization import Tokenization
from services.gateway.dialects.workers_ai.routes import WorkersAIRoutes
from services.gateway.http.body_budget import BodyBudget
from services.gateway.http.cors import cors_config
from services.gateway.http.errors import error_of_http
from services.gateway.http.server import probes_alone
from services.gateway.models.live_models import PublicReadiness, Readiness
from services.gateway.models.model_list import ModelEntry, ModelList, TenantModels
from services.gateway.models.model_names import ModelNames
from services.gateway.models.served_models import ServedModels
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.rendered import RenderedMetrics
from services.gateway.operator.cluster.routes import ClusterRoutes
from services.gateway.operator.handlers import page_handlers
from services.gateway.operator.server_info import ServerInfo, ServerInfoRoutes
from services.gateway.operator.timeline_routes import TimelineRoutes
from services.gateway.request.preparer import Preparer
from services.gateway.request.reservation import Reservation
from services.gateway.request.submission import Submission
from services.gateway.tenancy.api_keys import ApiKeys, bearer_of
from shared.background import item_error, start_awaited
from shared.clock import Clock
from shared.errors import AuthenticationFailed, HearthError
from shared.telemetry.timeline import Timeline

log = structlog.get_logger(__name__)

Connection = ASGIConnection[Any, Any, Any, Any]
METRICS_TYPE = CONTENT_TYPE_LATEST.removesuffix("; charset=utf-8")  # Litestar adds it
BEARER = "api_key"
DOCS_PATH = "/docs"
READS = partial(route, http_method=[HttpMethod.GET, HttpMethod.HEAD])


class Health(msgspec.Struct, frozen=True):
    status: str


class Version(msgspec.Struct, frozen=True):
    version: str


class Routes:
    """The handlers, bound to one gateway."""

    def __init__(
        self,
        *,
        api_keys: ApiKeys,
        models: TenantModels,
        metrics: GatewayMetrics,
        readiness: Callable[[], Readiness],
        new_request_id: Callable[[], str],
        metrics_token: str,
        is_operator: Callable[[str | None], bool],
        version: str,
        clock: Clock,
    ) -> None:
        """`is_operator`: of an Authorization header."""
        self._api_keys = api_keys
        self._models = models
        self._metrics = metrics
        self._readiness = readiness
        self._new_request_id = new_request_id
        self._metrics_token = metrics_token.encode()
        self._version = version
        self._is_operator = is_operator
        self._rendered = RenderedMetrics(metrics.render, clock)
        self._openapi: asyncio.Task[bytes] | None = None

    async def authorize_metrics(self, connection: Connection, _: BaseRouteHandler) -> None:
        """Protects the metrics: two readings of these sums show the activity of other tenants."""
        given = bearer_of(connection.headers.get("authorization")) if self._metrics_token else ""
        if not hmac.compare_digest(given.encode(), self._metrics_token):
            raise AuthenticationFailed("the token for metrics is not valid")

    async def models(self, request: Request[Any, Any, Any]) -> Response[ModelList]:
        """Lists the models that the tenant may use, each by its name and then by its aliases.
        `client_version`: adds the empty list `models`.
        """
        models = await self._models.all(request.state.tenant)
        if "client_version" in request.query_params:  # sent by Codex alone
            models = msgspec.structs.replace(models, models=[])
        return Response(models, headers={"x-request-id": request.state.request_id})

    async def model(self, request: Request[Any, Any, Any]) -> Response[ModelEntry]:
        """Returns 404 for a model that this gateway does not serve, 403 for a model that the tenant
        may not use, 503 before any worker serves the model.
        """
        name = str(request.path_params["model_id"]).removeprefix("/")
        entry = await self._models.one(request.state.tenant, name)
        return Response(entry, headers={"x-request-id": request.state.request_id})

    async def health(self) -> Health:
        """Returns 200: the process is alive."""
        return Health("ok")

    async def ready(self, request: Request[Any, Any, Any]) -> Response[PublicReadiness]:
        """Returns 200 if a request would be served now, else 503; to the operator's token also the
        names of the processes.
        """
        await self._api_keys.poll_redis()
        readiness = self._readiness()
        is_operator = self._is_operator(request.headers.get("authorization"))
        body = readiness if is_operator else readiness.public
        return Response(body, status_code=200 if readiness.ready else 503)

    async def version(self) -> Version:
        return Version(self._version)

    async def metrics(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """`names=vllm`: under the names of vLLM. Returns 400 for other names."""
        text = await self._rendered.text(request.query_params.get("names", "hearth"))
        return Response(text, media_type=METRICS_TYPE)

    async def openapi(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Encoded once, on a thread: it takes 120 ms, and needs no key."""
        if self._openapi is None:
            self._openapi = start_awaited(asyncio.to_thread(_encoded_document, request.app))
        try:
            return Response(await asyncio.shield(self._openapi), media_type=MediaType.JSON)
        except BaseException as raised:
            item_error(raised)
            self._openapi = None  # the next request tries again
            raise

    async def docs(self, request: Request[Any, Any, Any]) -> Response[bytes] | None:
        """The same document, which the framework would compute on the event loop."""
        is_document = request.scope["path"].rstrip("/") in (DOCS_PATH, f"{DOCS_PATH}/openapi.json")
        return await self.openapi(request) if is_document else None

    def on_hearth_error(self, request: Request[Any, Any, Any], error: HearthError) -> Response[Any]:
        if request.method == "POST":
            self._count_refused(request, error)
        request_id = request.state.get("request_id") or self._new_request_id()
        response = error_response(request.scope["path"], error, request_id)
        reservation: Reservation | None = request.state.get("reservation")
        if reservation is not None:
            reservation.record.reject(error)
            response.headers = {**reservation.headers, **response.headers}
        return response

    def _count_refused(self, request: Request[Any, Any, Any], error: HearthError) -> None:
        tenant = request.state.get("tenant")
        self._metrics.count_refused(
            error.code,
            dialect=dialect_of(request.scope["path"]).name,
            tenant="" if tenant is None else tenant.tenant_id,
        )

    def on_http_error(self, request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
        response = self.on_hearth_error(request, error_of_http(error))
        response.headers.update(error.headers or {})  # Allow
        return response

    def on_other_error(self, request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
        log.error("request_failed", path=request.url.path, exc_info=error)
        return self.on_hearth_error(request, HearthError("internal error"))


def build_app(
    *,
    submission: Submission,
    preparer: Preparer,
    answers: Answers,
    prefix_store: PrefixStore,
    response_store: ResponseStore,
    api_keys: ApiKeys,
    models: ServedModels,
    names: ModelNames,
    metrics: GatewayMetrics,
    readiness: Callable[[], Readiness],
    new_request_id: Callable[[], str],
    wall_clock: Callable[[], float],
    clock: Clock,
    keep_alive_s: float,
    max_body_bytes: int,
    body_budget: BodyBudget,
    version: str,
    cluster: ClusterRoutes,
    http_host: str,
    has_page: bool = True,
    find_timeline: Callable[[str], Timeline | None],
    metrics_token: str = "",
    read_info: Callable[[], ServerInfo],
    cors_origins: Sequence[str] = (),
) -> Litestar:
    """`answers`: of the endpoints that do not generate. `cors_origins`: of other sites whose pages
    may call.
    """
    routes = Routes(
        api_keys=api_keys,
        models=TenantModels(models, names, int(wall_clock())),
        metrics=metrics,
        readiness=readiness,
        new_request_id=new_request_id,
        metrics_token=metrics_token,
        is_operator=cluster.is_operator,
        version=version,
        clock=clock,
    )
    admission = Admission(
        submission,
        api_keys,
        new_request_id=new_request_id,
        max_body_bytes=max_body_bytes,
        budget=body_budget,
    )
    known: dict[str, Any] = {"middleware": [admission.middleware], "security": [{BEARER: []}]}
    endpoints = EndpointHandlers(
        submission, answers, clock=clock, keep_alive_s=keep_alive_s, options=known
    )
    prefixes = PrefixRoutes(submission, preparer, prefix_store, models.default_name)
    responses = ResponsesRoutes(response_store, preparer, models, names)
    tokenizers = TokenizerInfoRoute(Tokenization(preparer, names))
    return Litestar(
        [
            *(handler for dialect in DIALECTS for handler in endpoints.of(dialect)),
            *_model_handlers(routes, known),
            *prefixes.handlers(known),
            *responses.handlers(known),
            tokenizers.handler(known),
            *WorkersAIRoutes(endpoints, models, names).handlers(known),
            _timeline_handler(TimelineRoutes(find_timeline, api_keys, cluster.is_operator)),
            *_state_handlers(routes),
            _info_handler(ServerInfoRoutes(read_info, metrics_token, cluster.is_operator)),
            *page_handlers(cluster, http_host=http_host, has_page=has_page),
        ],
        exception_handlers={
            HearthError: routes.on_hearth_error,
            HTTPException: routes.on_http_error,
            Exception: routes.on_other_error,
        },
        openapi_config=_document(version, routes),
        cors_config=cors_config(cors_origins),
        middleware=[probes_alone],
        request_max_body_size=max_body_bytes,
        logging_config=None,
    )


def _model_handlers(routes: Routes, known: dict[str, Any]) -> list[HTTPRouteHandler]:
    free = {"opt": {IS_FREE: True}, "guards": [check_account], **known}
    models = READS(
        openai_paths("/models"),
        responses=described(ModelList, ErrorEnvelope, 401, 403, 503),
        **free,
    )
    model = READS(
        openai_paths("/models/{model_id:path}"),
        responses=described(ModelEntry, ErrorEnvelope, 401, 403, 404, 503),
        **free,
    )
    return [models(routes.models), model(routes.model)]


def _timeline_handler(timelines: TimelineRoutes) -> HTTPRouteHandler:
    timeline = get(
        "/v1/requests/{request_id:str}/timeline",
        guards=[timelines.authorize],
        security=[{BEARER: []}],
        responses=described(Timeline, ErrorEnvelope, 401, 404),
    )
    return timeline(timelines.timeline)


def _state_handlers(routes: Routes) -> list[HTTPRouteHandler]:
    """The routes of operators and load balancers, without an API key."""
    metrics = READS("/metrics", include_in_schema=False, guards=[routes.authorize_metrics])
    return [
        READS("/health")(routes.health),
        READS("/version")(routes.version),
        READS("/ready", responses=described(PublicReadiness, ErrorEnvelope))(routes.ready),
        metrics(routes.metrics),
        READS("/openapi.json", include_in_schema=False)(routes.openapi),
    ]


def _info_handler(info: ServerInfoRoutes) -> HTTPRouteHandler:
    handler = READS("/server_info", include_in_schema=False, guards=[info.authorize])
    return handler(info.server_info)


def _encoded_document(app: Litestar) -> bytes:
    return msgspec.json.encode(app.openapi_schema.to_schema())


def _document(version: str, routes: Routes) -> OpenAPIConfig:
    bearer = SecurityScheme(type="http", scheme="bearer", description="an API key")
    components = Components(security_schemes={BEARER: bearer})

    async def docs(request: Request[Any, Any, Any]) -> Response[bytes] | None:
        """A function, since Litestar copies a bound method with its object."""
        return await routes.docs(request)

    # Litestar's HTML pages load external scripts; only the JSON document is served.
    return OpenAPIConfig(
        title="Hearth",
        version=version,
        openapi_router=Router(
            DOCS_PATH,
            route_handlers=[],
            include_in_schema=False,
            dto=None,
            return_dto=None,
            before_request=docs,
        ),
        render_plugins=[JsonRenderPlugin(path="/")],
        components=components,
    )
