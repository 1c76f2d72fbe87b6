"""The routes of Anthropic's API."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from litestar import Request, Response
from litestar.params import Body

from services.gateway.anthropic.endpoint import MESSAGES
from services.gateway.anthropic.request import MessagesRequest, PromptFields
from services.gateway.anthropic.token_count import TokenCounter
from services.gateway.http.affinity import AFFINITY_HEADER, session_key_of
from services.gateway.http.body import RawBody, StrictBody
from services.gateway.http.response import GenerationResponse
from services.gateway.request.opener import Opener
from shared.clock import Clock

REQUEST_ID = "request-id"  # the header in which this dialect's clients look for it


class MessagesBody(StrictBody):
    fields = MESSAGES.fields


class CountBody(RawBody):
    struct = PromptFields


class AnthropicRoutes:
    """The handlers of one gateway. `keep_alive_s`: silence of a stream before a ping is sent."""

    def __init__(
        self, opener: Opener, counter: TokenCounter, *, clock: Clock, keep_alive_s: float
    ) -> None:
        self._opener = opener
        self._counter = counter
        self._clock = clock
        self._keep_alive_s = keep_alive_s

    async def messages(
        self, request: Request[Any, Any, Any], data: Annotated[MessagesRequest, Body()]
    ) -> GenerationResponse:
        """Anthropic's Messages. With `stream`, its server-sent events."""
        opened = await self._opener.open(
            MESSAGES,
            data,
            request.state.reservation,
            prompts=request.state.prompts,
            affinity_key=_session_of(request.headers),
        )
        headers = {**opened.headers, REQUEST_ID: request.state.request_id}
        opened = dataclasses.replace(opened, headers=headers)
        return GenerationResponse(opened, clock=self._clock, keep_alive_s=self._keep_alive_s)

    async def count_tokens(
        self, request: Request[Any, Any, Any], data: Annotated[bytes, Body()]
    ) -> Response[bytes]:
        """The tokens of the prompt that the same request to `/v1/messages` would have."""
        body = await self._counter.count(request.state.tenant, data)
        request_id = request.state.request_id
        headers = {"x-request-id": request_id, REQUEST_ID: request_id}
        limits = request.state.reservation.headers
        return Response(body, media_type="application/json", headers={**headers, **limits})


def _session_of(headers: Mapping[str, str]) -> str | None:
    """The session of a client overrides the body's user, who may have several."""
    return headers.get(AFFINITY_HEADER) or session_key_of(headers)
