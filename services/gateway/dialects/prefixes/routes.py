"""`/v1/prefixes`: named prefixes that are pinned in the workers' caches."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from litestar import Request, Response, delete, get, post, put
from litestar.params import Body

from services.gateway.dialects.dialect import Handlers
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.openai.errors import ErrorEnvelope
from services.gateway.dialects.prefixes.bodies import (
    DeletedPrefix,
    DryRunBody,
    DryRunReport,
    DryRunRequest,
    Prefix,
    PrefixBody,
    PrefixList,
    PrefixRequest,
)
from services.gateway.dialects.prefixes.dry_run import dry_run
from services.gateway.dialects.prefixes.large_bodies import DRY_RUN, PREFIX
from services.gateway.dialects.prefixes.store import PrefixStore
from services.gateway.dialects.route_options import BODY_KIND
from services.gateway.http.openapi import described
from services.gateway.request.endpoint import ERRORS
from services.gateway.request.preparer import Preparer

READS = (401, 429, 503)  # statuses


class PrefixRoutes:
    def __init__(
        self,
        http: HttpParts,
        preparer: Preparer,
        prefix_store: PrefixStore,
        default_model: str,
    ) -> None:
        self._submission = http.submission
        self._options = http.options
        self._preparer = preparer
        self._prefix_store = prefix_store
        self._default_model = default_model

    def handlers(self) -> Handlers:
        known = self._options
        one = {"path": "/v1/prefixes/{name:str}", "return_dto": None, **known}
        pin = put(
            dto=PrefixBody,
            opt={BODY_KIND: PREFIX},
            summary="Pins a prefix",
            responses=described(Prefix, ErrorEnvelope, *ERRORS, 409),
            **one,
        )
        read = get(
            summary="Returns a prefix",
            description="With the workers that hold it, its hits, and the tokens that it saved.",
            responses=described(Prefix, ErrorEnvelope, *READS, 404),
            **one,
        )
        removal = delete(
            summary="Deletes a prefix",
            description="Workers no longer pin it.",
            responses=described(DeletedPrefix, ErrorEnvelope, *READS, 404),
            status_code=200,
            **one,
        )
        listing = get(
            "/v1/prefixes",
            summary="Lists prefixes",
            responses=described(PrefixList, ErrorEnvelope, *READS),
            **known,
        )
        trial = post(
            "/v1/prefixes/dry_run",
            dto=DryRunBody,
            opt={BODY_KIND: DRY_RUN},
            summary="Says what a cache would hold of a prompt",
            return_dto=None,
            status_code=200,
            responses=described(DryRunReport, ErrorEnvelope, *ERRORS),
            **known,
        )
        return [
            pin(self.put),
            read(self.get),
            removal(self.delete),
            listing(self.list),
            trial(self.dry_run),
        ]

    async def put(
        self, request: Request[Any, Any, Any], data: Annotated[PrefixRequest, Body()]
    ) -> Response[Prefix]:
        """Pins a prefix and replaces one with the same name. The prefix is warm soon after."""
        name = str(request.path_params["name"])
        charge = partial(self._submission.charge_input, request.state.reservation)
        tenant = request.state.tenant
        prefix = await self._prefix_store.put(tenant, name, data, charge=charge)
        return _response(request, prefix)

    async def get(self, request: Request[Any, Any, Any]) -> Response[Prefix]:
        name = str(request.path_params["name"])
        return _response(request, await self._prefix_store.get(request.state.tenant, name))

    async def list(self, request: Request[Any, Any, Any]) -> Response[PrefixList]:
        """The tenant's prefixes, then the public ones."""
        return _response(request, await self._prefix_store.list(request.state.tenant))

    async def delete(self, request: Request[Any, Any, Any]) -> Response[DeletedPrefix]:
        name = str(request.path_params["name"])
        await self._prefix_store.delete(request.state.tenant, name)
        return _response(request, DeletedPrefix(name=name))

    async def dry_run(
        self, request: Request[Any, Any, Any], data: Annotated[DryRunRequest, Body()]
    ) -> Response[DryRunReport]:
        """Returns the tokens that would hit now and where two prompts diverge. Runs no model."""
        tenant = request.state.tenant
        report = await dry_run(
            data,
            tenant.tenant_id,
            choose=partial(self._submission.choose, request.state.reservation),
            prepare=partial(self._preparer.prepare, tenant, request.state.request_id),
            prefix_store=self._prefix_store,
            default_model=self._default_model,
        )
        return _response(request, report)


def _response(request: Request[Any, Any, Any], content: Any) -> Response[Any]:
    limits = request.state.reservation.headers
    return Response(content, headers={"x-request-id": request.state.request_id, **limits})
