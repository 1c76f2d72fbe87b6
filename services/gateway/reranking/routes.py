"""`/rerank` and `/score`, over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request
from litestar.params import Body

from services.gateway.http.affinity import AFFINITY_HEADER, session_key_of
from services.gateway.http.body import StrictBody
from services.gateway.http.response import GenerationResponse
from services.gateway.request.endpoint import Endpoint
from services.gateway.request.opener import Opener
from services.gateway.reranking.bodies import RerankRequest, ScoreRequest
from services.gateway.reranking.endpoints import RERANK, SCORE
from shared.clock import Clock


class RerankBody(StrictBody):
    fields = RERANK.fields


class ScoreBody(StrictBody):
    fields = SCORE.fields


class RerankRoutes:
    """The handlers of one gateway."""

    def __init__(self, opener: Opener, *, clock: Clock, keep_alive_s: float) -> None:
        self._opener = opener
        self._clock = clock
        self._keep_alive_s = keep_alive_s

    async def rerank(
        self, request: Request[Any, Any, Any], data: Annotated[RerankRequest, Body()]
    ) -> GenerationResponse:
        """Documents, sorted by what a query has to do with them."""
        return await self._open(RERANK, request, data)

    async def score(
        self, request: Request[Any, Any, Any], data: Annotated[ScoreRequest, Body()]
    ) -> GenerationResponse:
        """The score of each pair of texts."""
        return await self._open(SCORE, request, data)

    async def _open(
        self, endpoint: Endpoint, request: Request[Any, Any, Any], body: Any
    ) -> GenerationResponse:
        opened = await self._opener.open(
            endpoint,
            body,
            request.state.reservation,
            prompts=request.state.prompts,
            affinity_key=request.headers.get(AFFINITY_HEADER),
            session_key=session_key_of(request.headers),
        )
        return GenerationResponse(opened, clock=self._clock, keep_alive_s=self._keep_alive_s)
