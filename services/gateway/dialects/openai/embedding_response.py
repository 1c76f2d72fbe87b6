"""Encodes the response of an embeddings request."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.gateway.dialects.openai.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from services.gateway.dialects.openai.errors import OpenAIEncoder
from services.gateway.dialects.openai.usage import hearth_info_of
from services.gateway.http.json_parts import with_list
from services.gateway.output.embedding_vector import check_embeddings, little_endian, unpack_vector
from services.gateway.output.results import Results
from services.gateway.request.endpoint import ResponseContext

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
        """Returns the response in parts. Raises HearthError if a worker ended a request without its
        embedding.
        """
        packed = check_embeddings(each.embedding for each in self.context.merger.outputs)
        num_tokens = results.usage.prompt
        embeddings = EmbeddingList(
            data=[],
            model=self.context.model,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            hearth=hearth_info_of(self.context),
        )
        encoded = (
            (_encode(Embedding(index=index, embedding=self._vector(each))),)
            for index, each in enumerate(packed)
        )
        return with_list(_encode(embeddings), b"data", encoded)

    def _vector(self, packed: bytes) -> list[float] | str:
        vector = unpack_vector(packed, is_normalized=self.is_normalized)
        return b64encode(little_endian(vector)).decode() if self.is_base64 else vector.tolist()
