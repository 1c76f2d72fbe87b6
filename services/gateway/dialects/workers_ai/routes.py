"""The routes of Workers AI: runs, and searches of the models that a tenant may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from litestar import HttpMethod, Request, Response, post, route

from services.gateway.dialects.dialect import Handlers
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.paths import ACCOUNT_ROOTS, check_account
from services.gateway.dialects.route_options import (
    BODY_KIND,
    IS_FREE,
    MODEL_OF,
    TAKES_IMAGES,
)
from services.gateway.dialects.workers_ai.catalog_search import (
    SearchQuery,
    WorkersAIModel,
    model_rows,
    search_authors,
    search_models,
    search_query,
    search_tasks,
)
from services.gateway.dialects.workers_ai.endpoints import RUN
from services.gateway.dialects.workers_ai.envelope import Success
from services.gateway.dialects.workers_ai.errors import MissingBody, WorkersAIErrorEnvelope
from services.gateway.dialects.workers_ai.model_id import parse_model_id
from services.gateway.dialects.workers_ai.model_schema import model_schema
from services.gateway.dialects.workers_ai.paths import model_part
from services.gateway.http.openapi import ENDPOINT, QUERY, described
from services.gateway.http.response import GenerationResponse
from services.gateway.models.gateway_models import GatewayModels
from services.gateway.schemas.struct_schemas import field_descriptions
from shared.errors import InvalidRequest
from shared.tenancy.tenant import TenantRecord

SEARCH_QUERY = field_descriptions(SearchQuery)
SCHEMA_QUERY = {"model": "The name or alias of the model."}

Search = Callable[[list[WorkersAIModel], SearchQuery], Success]


def run_model(scope: Mapping[str, Any]) -> str:
    """Returns the model that the path of a run names. Raises MalformedModelId."""
    return parse_model_id(model_part(scope["raw_path"]))


class WorkersAIRoutes:
    """The handlers of one gateway."""

    def __init__(self, http: HttpParts, models: GatewayModels) -> None:
        self._http = http
        self._models = models

    def handlers(self) -> Handlers:
        options = {"guards": [check_account], "return_dto": None, **self._http.options}
        # a path without a model reaches the handler, which names what is missing
        run = post(
            _paths("/run", "/run/{model:path}"),
            status_code=200,
            summary="Runs a model",
            opt={
                BODY_KIND: RUN.name,
                MODEL_OF: run_model,
                ENDPOINT: RUN,
                TAKES_IMAGES: RUN.takes_images,
            },
            request_max_body_size=None,  # the admission has limited it
            responses=described(Success, WorkersAIErrorEnvelope, *RUN.errors),
            **options,
        )
        searches = {
            "/models/search": (self.models, "Finds models", SEARCH_QUERY),
            "/models/schema": (self.schema, "Returns JSON Schemas of a model", SCHEMA_QUERY),
            "/tasks/search": (self.tasks, "Finds tasks", SEARCH_QUERY),
            "/authors/search": (self.authors, "Finds authors", SEARCH_QUERY),
        }
        methods = [HttpMethod.GET, HttpMethod.HEAD]
        read = partial(
            route,
            http_method=methods,
            responses=described(Success, WorkersAIErrorEnvelope, 400, 401, 403),
            **options,
        )
        return [
            run(self.run),
            *(
                read(path=_paths(path), summary=summary, opt={IS_FREE: True, QUERY: query})(search)
                for path, (search, summary, query) in searches.items()
            ),
        ]

    async def run(self, request: Request[Any, Any, Any]) -> GenerationResponse:
        """Runs the model that the path names; with `stream`, server-sent events. The body is JSON,
        whatever its content type says: Cloudflare's examples send none.
        """
        model = run_model(request.scope)
        data = await request.body()
        if not data:
            raise MissingBody("the request has no body: send a JSON object")
        return await self._http.respond(RUN, request, RUN.fields.decode(data), model=model)

    async def models(self, request: Request[Any, Any, Any]) -> Response[Success]:
        """Finds models by name, task and author, by their names and their aliases."""
        return await self._searched(request, search_models)

    async def tasks(self, request: Request[Any, Any, Any]) -> Response[Success]:
        """The tasks of the models."""
        return await self._searched(request, search_tasks)

    async def authors(self, request: Request[Any, Any, Any]) -> Response[Success]:
        """The authors of the models, by their names."""
        return await self._searched(request, search_authors)

    async def schema(self, request: Request[Any, Any, Any]) -> Response[Success]:
        """Returns the JSON Schemas of a model's input and output."""
        name = request.query_params.get("model")
        if not name:
            raise InvalidRequest("the query needs a model", param="model")
        await self._check_model(request.state.tenant, parse_model_id(name))
        return self._response(request, Success(result=model_schema()))

    async def _check_model(self, tenant: TenantRecord, name: str) -> None:
        """Raises UnknownModel, ModelNotAllowed, and DependencyUnavailable if an alias cannot be
        checked.
        """
        resolved = await self._models.names.resolve(tenant.tenant_id, name)
        self._models.served.check(tenant, resolved)

    async def _searched(self, request: Request[Any, Any, Any], search: Search) -> Response[Success]:
        query = search_query(request.query_params)
        return self._response(request, search(await self._rows(request.state.tenant), query))

    async def _rows(self, tenant: TenantRecord) -> list[WorkersAIModel]:
        """Returns the models that the tenant may use and that can be served, by all their names."""
        found = self._models.names.all(tenant)
        return [row async for card, names in found for row in model_rows(card, names)]

    def _response(self, request: Request[Any, Any, Any], body: Success) -> Response[Success]:
        return Response(body, headers={"x-request-id": request.state.request_id})


def _paths(*ends: str) -> list[str]:
    return [f"{root}{end}" for root in ACCOUNT_ROOTS for end in ends]
