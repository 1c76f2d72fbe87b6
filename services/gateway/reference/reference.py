"""The reference of the API: `/openapi.json`, and `/docs` as a page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Request, Response, Router
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme, Tag

from services.gateway.dialects.dialect import Dialect
from services.gateway.http.openapi import BEARER
from services.gateway.reference.document import openapi_document
from services.gateway.reference.error_meanings import error_rows
from services.gateway.reference.page import page_headers, rendered_page
from shared.background import item_error, start_awaited

DOCS_PATH = "/docs"
ABOUT = "Serves large language models through OpenAI's, Anthropic's and Cloudflare's APIs."
OPERATION = Tag(name="Operation", description="For operators and load balancers.")
HttpRequest = Request[Any, Any, Any]


class MadeOnce:
    """Bytes that are made from the application once and on a thread, since this takes 0.4 s."""

    def __init__(self, make: Callable[[Litestar], bytes]) -> None:
        self._make = make
        self._made: asyncio.Task[bytes] | None = None

    async def of(self, app: Litestar) -> bytes:
        """Returns the bytes. Raises what made them fail; then the next call tries again."""
        if self._made is None:
            self._made = start_awaited(asyncio.to_thread(self._make, app))
        try:
            return await asyncio.shield(self._made)
        except BaseException as raised:
            item_error(raised)
            self._made = None
            raise


class Reference:
    """The reference of one gateway. `dialects`: in the order of the page."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._tags = [
            *(Tag(name=each.title, description=each.about) for each in dialects if each.title),
            OPERATION,
        ]
        self._document = MadeOnce(lambda app: msgspec.json.encode(openapi_document(app)))
        self._page = MadeOnce(lambda app: rendered_page(openapi_document(app), error_rows()))

    async def openapi(self, request: HttpRequest) -> Response[bytes]:
        """Returns the encoded document."""
        return Response(await self._document.of(request.app), media_type=MediaType.JSON)

    async def page(self, request: HttpRequest) -> Response[bytes]:
        """Returns the page."""
        page = await self._page.of(request.app)
        return Response(page, media_type=MediaType.HTML, headers=page_headers())

    def config(self, version: str) -> OpenAPIConfig:
        """Returns Litestar's configuration of the document and of the routes below DOCS_PATH."""
        bearer = SecurityScheme(
            type="http", scheme="bearer", description="An API key; `x-api-key` takes it, too."
        )

        async def docs(request: HttpRequest) -> Response[bytes] | None:
            """Returns the page or the document, which Litestar would compute on the event loop.
            This is a function, since Litestar copies a bound method with its object.
            """
            path = request.scope["path"].rstrip("/")
            if path == DOCS_PATH:
                return await self.page(request)
            return await self.openapi(request) if path == f"{DOCS_PATH}/openapi.json" else None

        return OpenAPIConfig(
            title="Hearth",
            version=version,
            description=ABOUT,
            tags=self._tags,
            use_handler_docstrings=True,
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
