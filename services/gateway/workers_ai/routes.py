"""The routes of Workers AI: runs, and searches of the models that a tenant may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from litestar import Request, Response

from services.gateway.http.affinity import AFFINITY_HEADER, session_key_of
from services.gateway.http.response import GenerationResponse
from services.gateway.models.model_names import ModelNames
from services.gateway.models.served_models import ServedModels
from services.gateway.request.opener import Opener
from services.gateway.workers_ai.catalog_search import (
    ModelRow,
    SearchQuery,
    model_rows,
    search_authors,
    search_models,
    search_query,
    search_tasks,
)
from services.gateway.workers_ai.endpoint import run_endpoint
from services.gateway.workers_ai.envelope import Success
from services.gateway.workers_ai.errors import MissingBody
from services.gateway.workers_ai.model_id import parse_model_id
from services.gateway.workers_ai.model_schema import model_schema
from services.gateway.workers_ai.paths import model_part
from shared.clock import Clock
from shared.errors import InvalidRequest
from shared.tenancy.tenant import TenantRecord

Search = Callable[[list[ModelRow], SearchQuery], Success]


def run_model(scope: Mapping[str, Any]) -> str:
    """The model that the path of a run names. Raises MalformedModelId."""
    return parse_model_id(model_part(scope["raw_path"]))


class WorkersAIRoutes:
    """The handlers of one gateway. `keep_alive_s`: silence before a stream sends an empty event.
    `random_bytes`: for the padding of streams; None: no padding.
    """

    def __init__(
        self,
        opener: Opener,
        models: ServedModels,
        names: ModelNames,
        *,
        clock: Clock,
        keep_alive_s: float,
        random_bytes: Callable[[int], bytes] | None,
    ) -> None:
        self._opener = opener
        self._models = models
        self._names = names
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._endpoint = run_endpoint(random_bytes)

    async def run(self, request: Request[Any, Any, Any]) -> GenerationResponse:
        """Runs the model that the path names; with `stream`, server-sent events. The body is JSON,
        whatever its content type says: Cloudflare's examples send none.
        """
        model = run_model(request.scope)
        data = await request.body()
        if not data:
            raise MissingBody("the request has no body: send a JSON object")
        opened = await self._opener.open(
            self._endpoint,
            self._endpoint.fields.decode(data),
            request.state.reservation,
            model=model,
            prompts=request.state.prompts,
            affinity_key=request.headers.get(AFFINITY_HEADER),
            session_key=session_key_of(request.headers),
        )
        return GenerationResponse(opened, clock=self._clock, keep_alive_s=self._keep_alive_s)

    async def models(self, request: Request[Any, Any, Any]) -> Response[Success]:
        """Finds models by name, task and author, by their names and their aliases."""
        return await self._searched(request, search_models)

    async def tasks(self, request: Request[Any, Any, Any]) -> Response[Success]:
        return await self._searched(request, search_tasks)

    async def authors(self, request: Request[Any, Any, Any]) -> Response[Success]:
        return await self._searched(request, search_authors)

    async def schema(self, request: Request[Any, Any, Any]) -> Response[Success]:
        """Returns the JSON Schemas of a model's input and output."""
        name = request.query_params.get("model")
        if not name:
            raise InvalidRequest("the query needs a model", param="model")
        await self._check_model(request.state.tenant, parse_model_id(name))
        return self._response(request, Success(result=model_schema()))

    async def _check_model(self, tenant: TenantRecord, name: str) -> None:
        """Raises UnknownModel, ModelNotAllowed, or DependencyUnavailable if an alias cannot be
        checked.
        """
        self._models.check(tenant, await self._names.resolve(tenant.tenant_id, name))

    async def _searched(self, request: Request[Any, Any, Any], search: Search) -> Response[Success]:
        query = search_query(request.query_params)
        return self._response(request, search(await self._rows(request.state.tenant), query))

    async def _rows(self, tenant: TenantRecord) -> list[ModelRow]:
        """The models that the tenant may use and that can be served, by all their names."""
        return [
            row async for card, names in self._names.all(tenant) for row in model_rows(card, names)
        ]

    def _response(self, request: Request[Any, Any, Any], body: Success) -> Response[Success]:
        return Response(body, headers={"x-request-id": request.state.request_id})
