"""Pairs of a query and a document, and the requests by which a model scores them.

any model               embeddings, of the last token unless its files name another pooling, one of
                        each text: their cosine is the score
a reranking checkpoint  a question about each pair, whose answer is yes or no: the score is the
                        softmax of the two logits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from services.gateway.request.generation_request import GenerationRequest, with_model_pooling
from services.gateway.request.prompt import ChatPrompt, TextPrompt
from services.gateway.request.sampling import SamplingFields
from services.gateway.text.model_files import ModelText, RankingTokens
from shared.errors import InvalidRequest

MAX_DOCUMENTS = 1000
PLACEHOLDER = "-"  # stands for a text whose tokens are known
# Qwen3's rerankers are trained with this. Other checkpoints are asked the same.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
NO_REASONING = {"enable_thinking": False}
# Added to both logits, so that they are the largest two: their difference is that of the model.
BIAS = 100.0


class PairText(NamedTuple):
    """A text and its place. `param`: the request field that holds it, such as `documents[3]`."""

    text: str
    param: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """`queries`: one for all documents, or one for each. `instruction`: what makes a document
    relevant to a reranking checkpoint; None: its default.
    """

    queries: Sequence[PairText]
    documents: Sequence[PairText]
    instruction: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a blank text, and for numbers of texts that do not match."""
        for each in (*self.queries, *self.documents):
            if not each.text or each.text.isspace():
                raise InvalidRequest(f"{each.param}: the text must not be blank", param=each.param)
        if len(self.queries) not in (1, len(self.documents)):
            param = self.documents[0].param.partition("[")[0]
            raise InvalidRequest(
                f"{param}: {len(self.documents)} texts for {len(self.queries)} queries", param=param
            )

    def query_place(self, place: int) -> int:
        """Returns the place of the query that belongs to the document at `place`."""
        return 0 if len(self.queries) == 1 else place


def embedding_requests(
    pairs: Pairs,
    model: str,
    *,
    cache_salt: str = "",
    priority: int | None = None,
    is_queueable: bool = True,
) -> list[GenerationRequest]:
    """Returns one request for each query, then one for each document."""
    return [
        GenerationRequest(
            model=model,
            prompt=TextPrompt(each.text, each.param),
            sampling=SamplingFields(),
            max_tokens=1,
            cache_salt=cache_salt,
            priority=priority,
            pooling="last",
            shows_output=False,
            is_queueable=is_queueable,
        )
        for each in (*pairs.queries, *pairs.documents)
    ]


def requests_for_model(
    pairs: Pairs, generations: Sequence[GenerationRequest], files: ModelText
) -> Sequence[GenerationRequest]:
    """Returns one question for each pair if the model is a reranking checkpoint, else
    `generations`, which are those of `embedding_requests`. Raises InvalidRequest if the model can
    score no pairs.
    """
    ranking = files.ranking
    if ranking is None:
        if pairs.instruction is not None:
            reason = "only a reranking model follows an instruction"
            raise InvalidRequest(f"instruction: {reason}", param="instruction")
        return with_model_pooling(generations, files.sentence_modules)
    if ranking.tokens is None or files.chat_template is None:
        reason = "this reranking model has no chat template, or no tokens for yes and no"
        raise InvalidRequest(f"model: {reason}", param="model")
    sampling = judging(ranking.tokens)
    return [
        msgspec.structs.replace(
            generations[0],
            prompt=_question(pairs, place),
            sampling=sampling,
            num_logprobs=2,
            pooling=None,
            shows_output=True,
        )
        for place in range(len(pairs.documents))
    ]


def _question(pairs: Pairs, place: int) -> ChatPrompt:
    query, document = pairs.queries[pairs.query_place(place)], pairs.documents[place]
    instruction = INSTRUCTION if pairs.instruction is None else pairs.instruction
    asked = f"<Instruct>: {instruction}\n<Query>: {query.text}\n<Document>: {document.text}"
    messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": asked})
    return ChatPrompt(messages, variables=NO_REASONING, param=document.param)


def judging(tokens: RankingTokens) -> SamplingFields:
    """Returns a request with every sampling option set: the model's defaults would change the
    distribution.
    """
    return SamplingFields(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
        ignore_eos=True,
        logit_bias=dict.fromkeys(tokens, BIAS),
        logprobs_mode="processed",
    )
