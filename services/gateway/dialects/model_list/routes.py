"""`GET /v1/models`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from litestar import HttpMethod, Request, Response, route

from services.gateway.dialects.dialect import Handlers
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.model_list.model_list import ModelEntry, ModelList, TenantModels
from services.gateway.dialects.openai.errors import ErrorEnvelope
from services.gateway.dialects.paths import check_account, openai_paths
from services.gateway.dialects.route_options import IS_FREE
from services.gateway.http.openapi import QUERY, described


class ModelRoutes:
    def __init__(self, models: TenantModels) -> None:
        self._models = models

    def handlers(self, http: HttpParts) -> Handlers:
        read = partial(
            route,
            http_method=[HttpMethod.GET, HttpMethod.HEAD],
            guards=[check_account],
            **http.options,
        )
        models = read(
            path=openai_paths("/models"),
            summary="Lists models",
            opt={
                IS_FREE: True,
                QUERY: {"client_version": "Of Codex: adds the empty list `models`."},
            },
            responses=described(ModelList, ErrorEnvelope, 401, 403, 503),
        )
        model = read(
            path=openai_paths("/models/{model_id:path}"),
            summary="Describes a model",
            opt={IS_FREE: True},
            responses=described(ModelEntry, ErrorEnvelope, 401, 403, 404, 503),
        )
        return [models(self.models), model(self.model)]

    async def models(self, request: Request[Any, Any, Any]) -> Response[ModelList]:
        """Lists the models that the tenant may use, each by its name and then by its aliases."""
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
