"""The paths of `/rerank` and `/score`: those of Cohere's clients, Jina's and vLLM's."""

from __future__ import annotations

from functools import partial
from typing import Any

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec

from services.gateway.reranking.endpoints import RERANK, SCORE
from services.gateway.reranking.routes import RerankBody, RerankRoutes, ScoreBody
from services.gateway.route_options import BODY_KIND

Responses = dict[int, ResponseSpec]


def rerank_handlers(
    routes: RerankRoutes, known: dict[str, Any], *, reranked: Responses, scored: Responses
) -> list[HTTPRouteHandler]:
    """`known`: options of handlers whose requests have an API key."""
    submits = partial(post, return_dto=None, status_code=200, **known)
    rerank = submits(
        path=["/v1/rerank", "/rerank", "/v2/rerank"],
        dto=RerankBody,
        opt={BODY_KIND: RERANK.name},
        responses=reranked,
    )
    score = submits(
        path=["/v1/score", "/score"], dto=ScoreBody, opt={BODY_KIND: SCORE.name}, responses=scored
    )
    return [rerank(routes.rerank), score(routes.score)]
