"""The response of `ai/run` to texts: {"shape": [n, d], "data": [[…]], "pooling": "mean"}."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from services.gateway.dialects.workers_ai.envelope import Success
from services.gateway.dialects.workers_ai.errors import DialectErrors
from services.gateway.http.json_parts import with_list
from services.gateway.output.embedding_vector import (
    FLOAT_BYTES,
    check_embeddings,
    unpack_vector,
)
from services.gateway.output.events import Event
from services.gateway.output.framing import Framing
from services.gateway.output.results import Results
from services.gateway.request.output_merger import OutputMerger
from shared.messages import Pooling

_encode = msgspec.json.Encoder().encode


class EmbeddingResult(msgspec.Struct, frozen=True, kw_only=True):
    shape: tuple[int, int]
    data: list[list[float]]
    pooling: Pooling


class WorkersAIEmbeddingEncoder(DialectErrors):
    def __init__(
        self, framing: Framing, merger: OutputMerger, pooling: Pooling, *, is_normalized: bool
    ) -> None:
        super().__init__(framing)
        self._merger = merger
        self._pooling = pooling
        self._is_normalized = is_normalized

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Returns no bytes: embeddings are not streamed."""
        return iter(())

    def body(self, results: Results) -> Iterator[bytes]:
        """Returns the response in parts. Raises HearthError if a worker ended a request without its
        embedding.
        """
        packed = check_embeddings(each.embedding for each in self._merger.outputs)
        shape = (len(packed), len(packed[0]) // FLOAT_BYTES if packed else 0)
        result = EmbeddingResult(shape=shape, data=[], pooling=self._pooling)
        rows = ((_encode(self._vector(each)),) for each in packed)
        return with_list(_encode(Success(result=result)), b"data", rows)

    def _vector(self, packed: bytes) -> list[float]:
        return unpack_vector(packed, is_normalized=self._is_normalized).tolist()
