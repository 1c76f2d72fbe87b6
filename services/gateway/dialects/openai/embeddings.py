"""OpenAI's embeddings: the types of the dialect, and their meaning in Hearth's terms.

`dimensions` must be the model's hidden size: a shorter vector is meaningful only if the model was
trained for this, which a checkpoint does not state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.prompts import Prompts, to_prompts
from services.gateway.dialects.openai.usage import HearthInfo
from services.gateway.request.generation_request import GenerationRequest, with_model_pooling
from services.gateway.request.sampling import MAX_INT, SamplingFields
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.text.model_files import ModelText
from shared.messages import Pooling

MAX_INPUTS = 2048  # as at OpenAI: clients make batches of so many


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed. `pooling`, `normalize` and the fields after them are extensions."""

    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    input: Prompts
    """A text, a list of tokens, or a list of either; each has one vector."""
    encoding_format: Literal["float", "base64"] | None = None
    """`float`: a list of numbers; `base64`: packed 32-bit floats."""
    dimensions: int | None = None
    """The length of the vectors, which can only be the model's hidden size."""
    pooling: Pooling | None = None
    """The hidden state that becomes the vector: of the `last` token, or the `mean` of all; by
    default that of the model's `modules.json`, or `last`."""
    normalize: bool | None = None
    """Whether vectors have the length 1; by default true."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens around the text; by default true."""
    user: str | None = None
    """Accepted for compatibility; it has no effect."""
    cache_salt: str | None = None
    """Separates the cached prefixes of this request from the tenant's others."""
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    """Higher goes first; a request can lower its tenant's priority, not raise it."""


EMBEDDING_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "messages": (None, []),
    "truncate_prompt_tokens": (None,),
}
EMBEDDING_FIELDS = SupportedFields(EmbeddingRequest, EMBEDDING_NEUTRAL_VALUES)


def to_generation_requests(body: EmbeddingRequest, default_model: str) -> list[GenerationRequest]:
    """Returns one request per input."""
    add_special_tokens = body.add_special_tokens is not False
    prompts = to_prompts(
        "input", body.input, add_special_tokens=add_special_tokens, most=MAX_INPUTS
    )
    return [
        GenerationRequest(
            model=body.model or default_model,
            prompt=prompt,
            sampling=SamplingFields(),
            max_tokens=1,
            cache_salt="" if body.cache_salt is None else body.cache_salt,
            priority=body.priority,
            dimensions=body.dimensions,
            pooling="last" if body.pooling is None else body.pooling,
            shows_output=False,
        )
        for prompt in prompts
    ]


def for_model(
    body: EmbeddingRequest, generations: Sequence[GenerationRequest], files: ModelText
) -> Sequence[GenerationRequest]:
    """Raises InvalidRequest for a model whose own vectors are not served."""
    if body.pooling is not None:
        return generations
    return with_model_pooling(generations, files.sentence_modules)


# ── responses ────────────────────────────────────────────────────────────────────────────────────


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    """The place of the input in the request, from 0."""
    embedding: list[float] | str
    """The vector; as base64 it is little-endian 32-bit floats."""


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    hearth: HearthInfo
