"""The HTTP handlers of declared endpoints."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec
from litestar.params import Body
from litestar.types import Receive, Scope, Send

from services.gateway.dialects.dialect import Answer, Answers, Dialect
from services.gateway.dialects.paths import check_account
from services.gateway.dialects.route_options import BODY_KIND, RAW
from services.gateway.http.affinity import AFFINITY_HEADER, session_key_of
from services.gateway.http.body import RawBody, StrictBody
from services.gateway.http.response import GenerationResponse
from services.gateway.request.endpoint import Endpoint, GeneratingEndpoint
from services.gateway.request.submission import Submission
from shared.clock import Clock

HttpRequest = Request[Any, Any, Any]
Handlers = list[HTTPRouteHandler]
PART_BYTES = 128 << 10  # 0.1 ms of the event loop


def described(body: type[Any], error: type[Any], *statuses: int) -> dict[int, ResponseSpec]:
    """Returns what the OpenAPI document says of the responses. `error`: the type of a rejection."""
    served = ResponseSpec(body, generate_examples=False, description="served")
    rejected = ResponseSpec(error, generate_examples=False, description="rejected")
    return {200: served, **dict.fromkeys(statuses, rejected)}


class JsonParts:
    """An ASGI application for one response: a MiB of text can have 7 MiB of tokens."""

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


class EndpointHandlers:
    """Makes the handlers of one gateway. `keep_alive_s`: silence of a stream before something is
    sent that keeps it alive. `options`: of all handlers.
    """

    def __init__(
        self,
        submission: Submission,
        answers: Answers,
        *,
        clock: Clock,
        keep_alive_s: float,
        options: Mapping[str, Any],
    ) -> None:
        self._submission = submission
        self._answers = answers
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._options: dict[str, Any] = {
            "guards": [check_account],
            "status_code": 200,
            "return_dto": None,
            **options,
        }

    def of(self, dialect: Dialect) -> Handlers:
        return [self._handler(dialect, each) for each in dialect.endpoints if each.paths]

    async def respond(
        self,
        endpoint: GeneratingEndpoint,
        request: HttpRequest,
        body: Any,
        *,
        model: str | None = None,
        request_id_headers: tuple[str, ...] = (),
    ) -> GenerationResponse:
        """Opens the request that a body is. `model`: of a body that names none (default: the
        gateway's). Raises the HearthError that rejects it.
        """
        affinity_key = request.headers.get(AFFINITY_HEADER)
        session_key = session_key_of(request.headers)
        if endpoint.is_for_session:
            affinity_key = affinity_key or session_key
        opened = await self._submission.open(
            endpoint,
            body,
            request.state.reservation,
            model=model,
            prompts=request.state.prompts,
            affinity_key=affinity_key,
            session_key=session_key,
        )
        ids = dict.fromkeys(request_id_headers, request.state.request_id)
        opened = dataclasses.replace(opened, headers={**opened.headers, **ids})
        return GenerationResponse(opened, clock=self._clock, keep_alive_s=self._keep_alive_s)

    def _handler(self, dialect: Dialect, endpoint: Endpoint) -> HTTPRouteHandler:
        if isinstance(endpoint, GeneratingEndpoint):
            answer, kind = self._generating(dialect, endpoint), endpoint.name
            dto: type[StrictBody] = type("_Body", (StrictBody,), {"fields": endpoint.fields})
        else:
            answer, kind = _converting(dialect, self._answers[endpoint.name]), RAW
            dto = type("_Body", (RawBody,), {"struct": endpoint.request})
        answer.__name__, answer.__doc__ = endpoint.operation, endpoint.description
        route = post(
            list(endpoint.paths),
            dto=dto,
            opt={BODY_KIND: kind},
            responses=described(endpoint.response, dialect.error, *endpoint.errors),
            **self._options,
        )
        return route(answer)

    def _generating(self, dialect: Dialect, endpoint: GeneratingEndpoint) -> Any:
        async def answer(request: HttpRequest, data: Any) -> GenerationResponse:
            ids = dialect.request_id_headers
            return await self.respond(endpoint, request, data, request_id_headers=ids)

        # the web framework reads the type of the body from here
        answer.__annotations__["data"] = Annotated[endpoint.request, Body()]
        return answer


def _converting(dialect: Dialect, convert: Answer) -> Any:
    async def answer(request: HttpRequest, data: Annotated[bytes, Body()]) -> JsonParts:
        body = await convert(request.state.tenant, data)
        ids = dict.fromkeys(dialect.request_id_headers, request.state.request_id)
        return JsonParts(body, {**ids, **request.state.reservation.headers})

    return answer
