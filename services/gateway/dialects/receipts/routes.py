"""`GET /v1/requests/{id}/receipt` and `GET /v1/receipts/keys`."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get

from services.gateway.dialects.dialect import Handlers
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.openai.errors import ErrorEnvelope
from services.gateway.dialects.receipts.issued import TenantReceipts
from services.gateway.dialects.route_options import IS_FREE
from services.gateway.http.openapi import described
from shared.receipts.jws import JwkSet
from shared.receipts.receipt import IssuedReceipt

NO_STORE = {"cache-control": "no-store"}


class ReceiptRoutes:
    def __init__(self, receipts: TenantReceipts) -> None:
        self._receipts = receipts

    def handlers(self, http: HttpParts) -> Handlers:
        receipt = get(
            "/v1/requests/{request_id:str}/receipt",
            summary="Proves where a response was computed",
            description=(
                "By the id of the request or of its response, to its tenant alone, from any "
                "gateway of the site to which the request was sent. 404 once it is forgotten."
            ),
            opt={IS_FREE: True},
            responses=described(IssuedReceipt, ErrorEnvelope, 401, 403, 404),
            **http.options,
        )
        keys = get(
            "/v1/receipts/keys",
            summary="Lists the public keys of receipts",
            description="As a JWK Set, without an API key.",
            security=[],
            responses=described(JwkSet, ErrorEnvelope),
        )
        return [receipt(self.receipt), keys(self.keys)]

    async def receipt(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns the receipt as a JWS, with its salt."""
        name = str(request.path_params["request_id"])
        found = await self._receipts.find(request.state.tenant, name)
        headers = {"x-request-id": request.state.request_id, **NO_STORE}
        encoded = msgspec.json.encode(found)
        return Response(encoded, headers=headers, media_type="application/json")

    async def keys(self) -> Response[bytes]:
        """Returns this site's key first, then those of linked sites."""
        found = msgspec.json.encode(await self._receipts.keys())
        return Response(found, media_type="application/json")
