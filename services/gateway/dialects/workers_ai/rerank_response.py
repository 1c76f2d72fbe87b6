"""The response of `ai/run` to a query with contexts: {"response": [{"id": 1, "score": 0.9}, …]}."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from services.gateway.dialects.ranking.pairs import Pairs
from services.gateway.dialects.ranking.ranked import ranked
from services.gateway.dialects.ranking.scores import scores
from services.gateway.dialects.workers_ai.envelope import Success
from services.gateway.dialects.workers_ai.errors import DialectErrors
from services.gateway.output.events import Event
from services.gateway.output.results import Results
from services.gateway.request.endpoint import ResponseContext

_encode = msgspec.json.Encoder().encode


class RankedContextScore(msgspec.Struct, frozen=True):
    """`id`: the context's place in the request."""

    id: int
    score: float


class WorkersAIRerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sorted by score."""

    response: Sequence[RankedContextScore]


class WorkersAIRerankEncoder(DialectErrors):
    """`limit`: the number of results at most; None: all."""

    def __init__(self, context: ResponseContext, pairs: Pairs, limit: int | None) -> None:
        super().__init__(context.framing)
        self._context = context
        self._pairs = pairs
        self._limit = limit

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Returns no bytes: ranks are not streamed."""
        return iter(())

    def body(self, results: Results) -> Iterator[bytes]:
        """Returns the response in parts. Raises HearthError if a worker ended a request without
        what its score needs.
        """
        found: list[float] = []
        for score in scores(self._pairs, self._context, results):
            found.append(score)
            yield b""
        rows = [RankedContextScore(place, found[place]) for place in ranked(found, self._limit)]
        yield _encode(Success(result=WorkersAIRerankResult(response=rows)))
