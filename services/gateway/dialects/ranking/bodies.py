"""Request and response bodies of `/rerank`, in the shapes of Cohere and Jina, and of `/score`, in
vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.usage import HearthInfo
from services.gateway.dialects.ranking.pairs import MAX_DOCUMENTS, PLACEHOLDER, Pairs, PairText
from services.gateway.http.text_fields import TextFields
from services.gateway.request.sampling import MAX_INT

MAX_INSTRUCTION_CHARS = 4096
Priority = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
Instruction = Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)]

# Fields that would change the scores and are not supported, with the values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "activation": (None,),
    "chat_template": (None,),
    "images": (None, []),
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "max_tokens_per_query": (None,),
    "mm_processor_kwargs": (None, {}),
    "rank_fields": (None, [], ["text"]),
    "truncate_prompt_tokens": (None,),
    "use_activation": (None, True),
}


class Document(msgspec.Struct, frozen=True):
    text: str
    """The text of the document."""


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Documents to order by a query."""

    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    query: str
    """What the documents are compared with."""
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    """The texts to rank."""
    top_n: Annotated[int, Meta(ge=1)] | None = None
    """How many results are returned, the best first; by default all."""
    return_documents: bool | None = None
    """Whether each result has its document; by default false."""
    instruction: Instruction | None = None
    """For a reranking model: what makes a document relevant."""
    user: str | None = None
    """Accepted for compatibility; it has no effect."""
    cache_salt: str | None = None
    """Separates the cached prefixes of this request from the tenant's others."""
    priority: Priority | None = None
    """Higher goes first; a request can lower its tenant's priority, not raise it."""

    @property
    def pairs(self) -> Pairs:
        """Returns the query and the documents. Raises InvalidRequest."""
        documents = texts_of([text_of(each) for each in self.documents], "documents")
        return Pairs([PairText(self.query, "query")], documents, self.instruction)


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_DOCUMENTS)]


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of texts to compare."""

    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    text_1: Texts
    """One text for all of `text_2`, or as many."""
    text_2: Texts
    """A text or texts that are compared with `text_1`."""
    instruction: Instruction | None = None
    """For a reranking model: what makes a text relevant."""
    user: str | None = None
    """Accepted for compatibility; it has no effect."""
    cache_salt: str | None = None
    """Separates the cached prefixes of this request from the tenant's others."""
    priority: Priority | None = None
    """Higher goes first; a request can lower its tenant's priority, not raise it."""

    @property
    def pairs(self) -> Pairs:
        """Returns the texts as queries and documents. Raises InvalidRequest."""
        one, other = texts_of(self.text_1, "text_1"), texts_of(self.text_2, "text_2")
        return Pairs(one, other, self.instruction)


RERANK_FIELDS = TextFields(RerankRequest, NEUTRAL_VALUES)
SCORE_FIELDS = TextFields(ScoreRequest, NEUTRAL_VALUES)


def text_of(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


def texts_of(given: str | Sequence[str], param: str) -> list[PairText]:
    if isinstance(given, str):
        return [PairText(given, param)]
    return [PairText(each, f"{param}[{place}]") for place, each in enumerate(given)]


def rerank_without_prompts(body: RerankRequest, _: int) -> RerankRequest:
    """Returns the body with empty prompts, but for documents that the response repeats."""
    if body.return_documents:
        return msgspec.structs.replace(body, query=PLACEHOLDER)
    documents: list[str | Document] = [PLACEHOLDER] * len(body.documents)
    return msgspec.structs.replace(body, query=PLACEHOLDER, documents=documents)


def score_without_prompts(body: ScoreRequest, _: int) -> ScoreRequest:
    one, other = _placeholders(body.text_1), _placeholders(body.text_2)
    return msgspec.structs.replace(body, text_1=one, text_2=other)


def _placeholders(given: Texts) -> Texts:
    return PLACEHOLDER if isinstance(given, str) else [PLACEHOLDER] * len(given)


# ── responses ────────────────────────────────────────────────────────────────────────────────────


class ScoringUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    """With one token for each answer of a reranking model."""


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The place of the document in the request, from 0."""
    relevance_score: float
    """From 0 to 1 of a reranking model; a cosine from -1 to 1 of others."""
    document: Document | msgspec.UnsetType = msgspec.UNSET
    """The document, if it was asked for."""


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    usage: ScoringUsage
    results: list[RerankResult]
    """Sorted by score; of equal ones the first document comes first."""
    hearth: HearthInfo


class Score(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The place of the pair in the request, from 0."""
    object: Literal["score"] = "score"
    score: float
    """As `relevance_score` of `/v1/rerank`."""


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`data`: in the order of `text_2`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: ScoringUsage
    hearth: HearthInfo
