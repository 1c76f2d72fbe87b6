"""`/rerank` and `/score` as a dialect: their texts are pairs, which a model scores.

The paths are those of Cohere's clients, Jina's and vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.dialects.ranking.bodies import (
    RERANK_FIELDS,
    SCORE_FIELDS,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    rerank_without_prompts,
    score_without_prompts,
)
from services.gateway.dialects.ranking.pairs import embedding_requests, requests_for_model
from services.gateway.dialects.ranking.responses import RerankEncoder, ScoreEncoder
from services.gateway.request.endpoint import GeneratingEndpoint
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.text.model_files import ModelText

Body = RerankRequest | ScoreRequest


def _requests(body: Body, default_model: str) -> list[GenerationRequest]:
    """Returns requests for embeddings, which `_for_model` may replace. Raises InvalidRequest."""
    return embedding_requests(
        body.pairs,
        body.model or default_model,
        cache_salt=body.cache_salt or "",
        priority=body.priority,
    )


def _for_model(
    body: Body, generations: Sequence[GenerationRequest], files: ModelText
) -> Sequence[GenerationRequest]:
    return requests_for_model(body.pairs, generations, files)


RERANK = GeneratingEndpoint(
    name="rerank",
    operation="rerank",
    summary="Ranks documents",
    description="The documents, sorted by what a query has to do with them; as Cohere and Jina do.",
    example={"query": "a fruit", "documents": ["an apple", "a hammer"], "top_n": 1},
    paths=("/v1/rerank", "/rerank", "/v2/rerank"),
    request=RerankRequest,
    response=RerankResponse,
    fields=RERANK_FIELDS,
    generations=_requests,
    for_model=_for_model,
    is_streamed=lambda _: False,
    encoder=RerankEncoder.of,
    without_prompts=rerank_without_prompts,
)
SCORE = GeneratingEndpoint(
    name="score",
    operation="score",
    summary="Scores pairs of texts",
    description="The score of each pair, in the order of `text_2`.",
    example={"text_1": "a fruit", "text_2": ["an apple", "a hammer"]},
    paths=("/v1/score", "/score"),
    request=ScoreRequest,
    response=ScoreResponse,
    is_on_nats=False,
    fields=SCORE_FIELDS,
    generations=_requests,
    for_model=_for_model,
    is_streamed=lambda _: False,
    encoder=ScoreEncoder.of,
    without_prompts=score_without_prompts,
)
DIALECT = Dialect(
    name="openai",
    title="Rerank and score",
    about="By a reranking model, or by the embeddings of any model.",
    endpoints=(RERANK, SCORE),
    encode_error=encode_error,
    error=ErrorEnvelope,
)
