"""Makes the HTTP handlers of a dialect: those of its declared endpoints, and its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body
from litestar.types import Receive, Scope, Send

from services.gateway.dialects.dialect import Answer, Dialect, Handlers, OpenDialect
from services.gateway.dialects.http_parts import HttpParts, HttpRequest
from services.gateway.dialects.paths import check_account
from services.gateway.dialects.route_options import BODY_KIND, RAW, TAKES_IMAGES
from services.gateway.http.body import RawBody, StrictBody
from services.gateway.http.openapi import ENDPOINT, described
from services.gateway.http.response import GenerationResponse
from services.gateway.request.endpoint import Endpoint, GeneratingEndpoint

PART_BYTES = 128 << 10  # 0.1 ms of the event loop


class JsonParts:
    """An ASGI application that sends one JSON body in parts of PART_BYTES: the tokens of 1 MiB of
    text take up to 7 MiB.
    """

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self._body = body
        self._headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(self._body), PART_BYTES):
            if start:
                await asyncio.sleep(0)  # running streams continue
            end = start + PART_BYTES
            part, has_more = self._body[start:end], end < len(self._body)
            await send({"type": "http.response.body", "body": part, "more_body": has_more})


def handlers_of(dialect: Dialect, opened: OpenDialect, http: HttpParts) -> Handlers:
    declared = [_handler(dialect, opened, http, each) for each in dialect.endpoints if each.paths]
    return [*declared, *opened.handlers(http)]


def _handler(
    dialect: Dialect, opened: OpenDialect, http: HttpParts, endpoint: Endpoint
) -> HTTPRouteHandler:
    if isinstance(endpoint, GeneratingEndpoint):
        answer, kind = _generating(dialect, http, endpoint), endpoint.name
        dto: type[StrictBody] = type("_Body", (StrictBody,), {"fields": endpoint.fields})
    else:
        answer, kind = _converting(dialect, opened.answers[endpoint.name]), RAW
        dto = type("_Body", (RawBody,), {"struct": endpoint.request})
    answer.__name__, answer.__doc__ = endpoint.operation, endpoint.description
    route = post(
        list(endpoint.paths),
        dto=dto,
        opt={BODY_KIND: kind, ENDPOINT: endpoint, TAKES_IMAGES: endpoint.takes_images},
        request_max_body_size=None,  # the admission has limited it
        summary=endpoint.summary or None,
        responses=described(endpoint.response, dialect.error, *endpoint.errors),
        guards=[check_account],
        status_code=200,
        return_dto=None,
        **http.options,
    )
    return route(answer)


def _generating(dialect: Dialect, http: HttpParts, endpoint: GeneratingEndpoint) -> Any:
    async def answer(request: HttpRequest, data: Any) -> GenerationResponse:
        ids = dialect.request_id_headers
        return await http.respond(endpoint, request, data, request_id_headers=ids)

    # the web framework reads the type of the body from here
    answer.__annotations__["data"] = Annotated[endpoint.request, Body()]
    return answer


def _converting(dialect: Dialect, convert: Answer) -> Any:
    async def answer(request: HttpRequest, data: Annotated[bytes, Body()]) -> JsonParts:
        body = await convert(request.state.tenant, data)
        ids = dict.fromkeys(dialect.request_id_headers, request.state.request_id)
        return JsonParts(body, {**ids, **request.state.reservation.headers})

    return answer
