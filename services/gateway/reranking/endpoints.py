"""`/rerank` and `/score` as endpoints: the texts of each are pairs, which the model scores."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.request.endpoint import Endpoint
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.reranking.bodies import (
    RERANK_FIELDS,
    SCORE_FIELDS,
    RerankRequest,
    ScoreRequest,
    rerank_without_prompts,
    score_without_prompts,
)
from services.gateway.reranking.responses import RerankEncoder, ScoreEncoder
from services.gateway.scoring.pairs import embedding_requests, requests_for_model
from services.gateway.text.model_files import ModelFiles

Body = RerankRequest | ScoreRequest


def _requests(body: Body, default_model: str) -> list[GenerationRequest]:
    """Raises InvalidRequest."""
    return embedding_requests(
        body.pairs,
        body.model or default_model,
        cache_salt=body.cache_salt or "",
        priority=body.priority,
    )


def _for_model(
    body: Body, generations: Sequence[GenerationRequest], files: ModelFiles
) -> Sequence[GenerationRequest]:
    return requests_for_model(body.pairs, generations, files)


RERANK = Endpoint(
    name="rerank",
    fields=RERANK_FIELDS,
    generations=_requests,
    for_model=_for_model,
    is_streamed=lambda _: False,
    encoder=RerankEncoder.of,
    without_prompts=rerank_without_prompts,
)
SCORE = Endpoint(
    name="score",
    fields=SCORE_FIELDS,
    generations=_requests,
    for_model=_for_model,
    is_streamed=lambda _: False,
    encoder=ScoreEncoder.of,
    without_prompts=score_without_prompts,
)
