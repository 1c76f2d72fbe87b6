"""The response of an embeddings request."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.gateway.http.json_parts import with_list
from services.gateway.openai.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from services.gateway.openai.errors import OpenAIEncoder
from services.gateway.openai.usage import hearth_info_of
from services.gateway.output.results import Results
from services.gateway.request.endpoint import ResponseContext
from shared.errors import HearthError

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EmbeddingEncoder(OpenAIEncoder):
    is_base64: bool
    is_normalized: bool

    @classmethod
    def of(cls, body: EmbeddingRequest, context: ResponseContext) -> EmbeddingEncoder:
        return cls(
            context,
            is_base64=body.encoding_format == "base64",
            is_normalized=body.normalize is not False,
        )

    def body(self, results: Results) -> Iterator[bytes]:
        """Raises HearthError if a worker ended a request without its embedding."""
        outputs = self.context.merger.outputs
        for each in outputs:
            if not each.embedding or len(each.embedding) % 4:
                raise HearthError("the worker sent no embedding")
        num_tokens = results.usage.prompt
        embeddings = EmbeddingList(
            data=[],
            model=self.context.model,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            hearth=hearth_info_of(self.context),
        )
        encoded = (
            (_encode(Embedding(index=index, embedding=self._vector(output.embedding or b""))),)
            for index, output in enumerate(outputs)
        )
        return with_list(_encode(embeddings), b"data", encoded)

    def _vector(self, packed: bytes) -> list[float] | str:
        vector = _little_endian(array("f", packed))
        if self.is_normalized:
            vector = normalized(vector)
        return b64encode(_little_endian(vector)).decode() if self.is_base64 else vector.tolist()


def normalized(vector: array[float]) -> array[float]:
    """Scales the vector to length one; returns a zero vector unchanged."""
    length = math.hypot(*vector)
    return array("f", [value / length for value in vector]) if length else vector


def _little_endian(vector: array[float]) -> array[float]:
    """Converts to or from the wire's byte order."""
    if sys.byteorder == "big":
        vector.byteswap()
    return vector
