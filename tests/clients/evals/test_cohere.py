"""Cohere's SDK reranks, with both versions of its API."""

from __future__ import annotations

import math

import cohere
import pytest
from cohere.core.api_error import ApiError

from tests.clients.conftest import Reference
from tests.support.account import MODEL, Account

QUERY = "Where does the phrase Hello, World come from?"
DOCUMENTS = ["Brian Kernighan wrote it.", "PEP 8 is about style.", "The world is round."]


@pytest.fixture(params=[cohere.Client, cohere.ClientV2])
def client(request: pytest.FixtureRequest, account: Account) -> cohere.Client | cohere.ClientV2:
    return request.param(account.token, base_url=account.url)


def cosine(one: list[float], other: list[float]) -> float:
    dot = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return dot / (math.hypot(*one) * math.hypot(*other))


def test_ranks_are_those_of_the_embeddings(
    client: cohere.Client | cohere.ClientV2, reference: Reference
) -> None:
    query, *documents = reference.embeddings([QUERY, *DOCUMENTS])
    scores = [cosine(query, each) for each in documents]
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [each.index for each in answer.results] == sorted(
        range(len(scores)), key=lambda place: -scores[place]
    )[:2]
    for each in answer.results:
        assert each.relevance_score == pytest.approx(scores[each.index], abs=1e-3)
    assert answer.id


def test_error_names_the_field(client: cohere.Client | cohere.ClientV2) -> None:
    with pytest.raises(ApiError) as raised:
        client.rerank(model=MODEL, query="", documents=DOCUMENTS)
    assert raised.value.status_code == 400
    assert raised.value.body["error"]["param"] == "query"
