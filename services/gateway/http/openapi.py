"""The OpenAPI document: the responses of a route, and the document's own routes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Request, Response, Router
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

from shared.background import item_error, start_awaited

BEARER = "api_key"
SECURITY: list[dict[str, list[str]]] = [{BEARER: []}]  # routes that need an API key use it
DOCS_PATH = "/docs"


def described(body: type[Any], error: type[Any], *statuses: int) -> dict[int, ResponseSpec]:
    """Returns the OpenAPI responses of a route. `error` is the type of a rejection."""
    served = ResponseSpec(body, generate_examples=False, description="served")
    rejected = ResponseSpec(error, generate_examples=False, description="rejected")
    return {200: served, **dict.fromkeys(statuses, rejected)}


class OpenApiDocument:
    """The OpenAPI document, encoded once and on a thread, since this takes 120 ms."""

    def __init__(self) -> None:
        self._encoded: asyncio.Task[bytes] | None = None

    async def openapi(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns the encoded document."""
        if self._encoded is None:
            self._encoded = start_awaited(asyncio.to_thread(_encoded_document, request.app))
        try:
            return Response(await asyncio.shield(self._encoded), media_type=MediaType.JSON)
        except BaseException as raised:
            item_error(raised)
            self._encoded = None  # the next request tries again
            raise

    def config(self, version: str) -> OpenAPIConfig:
        """Returns Litestar's configuration of the document and of the routes below DOCS_PATH."""
        bearer = SecurityScheme(type="http", scheme="bearer", description="an API key")

        async def docs(request: Request[Any, Any, Any]) -> Response[bytes] | None:
            """Returns the encoded document, which Litestar would compute on the event loop. This is
            a function, since Litestar copies a bound method with its object.
            """
            path = request.scope["path"].rstrip("/")
            is_document = path in (DOCS_PATH, f"{DOCS_PATH}/openapi.json")
            return await self.openapi(request) if is_document else None

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
            components=Components(security_schemes={BEARER: bearer}),
        )


def _encoded_document(app: Litestar) -> bytes:
    return msgspec.json.encode(app.openapi_schema.to_schema())
