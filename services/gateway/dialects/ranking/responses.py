"""Encodes the responses of `/rerank` and `/score`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.gateway.dialects.openai.errors import OpenAIEncoder
from services.gateway.dialects.openai.usage import hearth_info_of
from services.gateway.dialects.ranking.bodies import (
    Document,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
    ScoringUsage,
    text_of,
)
from services.gateway.dialects.ranking.ranked import ranked
from services.gateway.dialects.ranking.scores import scores
from services.gateway.http.json_parts import with_list
from services.gateway.output.results import Results
from services.gateway.request.endpoint import ResponseContext

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class RerankEncoder(OpenAIEncoder):
    request: RerankRequest

    @classmethod
    def of(cls, body: RerankRequest, context: ResponseContext) -> RerankEncoder:
        return cls(context, body)

    def body(self, results: Results) -> Iterator[bytes]:
        """Returns the response in parts. Raises HearthError if a worker ended a request without
        what its score needs.
        """
        context, found = self.context, list[float]()
        for score in scores(self.request.pairs, context, results):
            found.append(score)
            yield b""
        response = RerankResponse(
            id=f"rerank-{context.request_id}",
            model=context.model,
            usage=_usage(results),
            results=[],
            hearth=hearth_info_of(context),
        )
        places = ranked(found, self.request.top_n)
        items = ((_encode(self._result(place, found[place])),) for place in places)
        yield from with_list(_encode(response), b"results", items)

    def _result(self, place: int, score: float) -> RerankResult:
        if not self.request.return_documents:
            return RerankResult(index=place, relevance_score=score)
        document = Document(text_of(self.request.documents[place]))
        return RerankResult(index=place, relevance_score=score, document=document)


@dataclass(frozen=True, slots=True)
class ScoreEncoder(OpenAIEncoder):
    request: ScoreRequest

    @classmethod
    def of(cls, body: ScoreRequest, context: ResponseContext) -> ScoreEncoder:
        return cls(context, body)

    def body(self, results: Results) -> Iterator[bytes]:
        """Returns the response in parts. Raises HearthError as `RerankEncoder.body` does."""
        context, found = self.context, list[Score]()
        for index, score in enumerate(scores(self.request.pairs, context, results)):
            found.append(Score(index=index, score=score))
            yield b""
        response = ScoreResponse(
            id=f"score-{context.request_id}",
            created=context.created,
            model=context.model,
            data=found,
            usage=_usage(results),
            hearth=hearth_info_of(context),
        )
        yield _encode(response)


def _usage(results: Results) -> ScoringUsage:
    usage = results.usage
    return ScoringUsage(prompt_tokens=usage.prompt, total_tokens=usage.prompt + usage.output)
