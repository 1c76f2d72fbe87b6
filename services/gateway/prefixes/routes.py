"""`/v1/prefixes`: named prefixes that stay in the workers' caches."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Protocol

from litestar import Request, Response
from litestar.params import Body

from services.gateway.catalog import Catalog
from services.gateway.prefixes.bodies import (
    DeletedPrefix,
    DryRunReport,
    DryRunRequest,
    Prefix,
    PrefixList,
    PrefixRequest,
)
from services.gateway.prefixes.dry_run import dry_run
from services.gateway.prefixes.store import PrefixStore
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.preparation import PreparedRequest
from services.gateway.text.model_files import ModelFiles
from shared.tenancy.tenant import TenantRecord


class PrefixGateway(Protocol):
    """What these routes need of the service behind them."""

    catalog: Catalog
    files: ModelFiles
    prefix_store: PrefixStore

    async def prepare(
        self, tenant: TenantRecord, request_id: str, generation: GenerationRequest
    ) -> PreparedRequest:
        """Raises the HearthError with which the request is refused."""
        ...


class PrefixRoutes:
    def __init__(self, gateway: PrefixGateway) -> None:
        self._gateway = gateway

    async def put(
        self, request: Request[Any, Any, Any], data: Annotated[PrefixRequest, Body()]
    ) -> Response[Prefix]:
        """Pins it, in the place of one with the same name; it is warm soon after."""
        name = str(request.path_params["name"])
        prefix = await self._gateway.prefix_store.put(request.state.tenant, name, data)
        return _response(request, prefix)

    async def get(self, request: Request[Any, Any, Any]) -> Response[Prefix]:
        name = str(request.path_params["name"])
        return _response(request, await self._gateway.prefix_store.get(request.state.tenant, name))

    async def list(self, request: Request[Any, Any, Any]) -> Response[PrefixList]:
        """The tenant's own, then the public ones."""
        return _response(request, await self._gateway.prefix_store.list(request.state.tenant))

    async def delete(self, request: Request[Any, Any, Any]) -> Response[DeletedPrefix]:
        name = str(request.path_params["name"])
        await self._gateway.prefix_store.delete(request.state.tenant, name)
        return _response(request, DeletedPrefix(name=name))

    async def dry_run(
        self, request: Request[Any, Any, Any], data: Annotated[DryRunRequest, Body()]
    ) -> Response[DryRunReport]:
        """Which tokens would hit now, and at which token two prompts part. Nothing is run."""
        gateway, tenant = self._gateway, request.state.tenant
        report = await dry_run(
            data,
            tenant.tenant_id,
            prepare=partial(gateway.prepare, tenant, request.state.request_id),
            prefix_store=gateway.prefix_store,
            tokenizer=gateway.files.tokenizer,
            card_of=gateway.catalog.card,
            default_model=gateway.catalog.name,
        )
        return _response(request, report)


def _response(request: Request[Any, Any, Any], content: Any) -> Response[Any]:
    return Response(content, headers={"x-request-id": request.state.request_id})
