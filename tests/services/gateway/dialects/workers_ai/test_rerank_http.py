"""`ai/run` with a query and contexts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.request import prepared_bodies
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.ranking.embeddings import texts_embedded
from tests.services.gateway.dialects.workers_ai.test_refusals import check_rejected
from tests.services.gateway.dialects.workers_ai.test_run_http import RUN
from tests.support.grids import in_one_test

CONTEXTS = ["the lazy dog", "hello world", "the quick brown fox"]
BODY: dict[str, Any] = {"query": "the quick fox", "contexts": [{"text": each} for each in CONTEXTS]}


@pytest.fixture(autouse=True)
def own_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    texts_embedded(monkeypatch)


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
async def test_scores_are_those_of_rerank(
    cluster: Cluster, monkeypatch: Any, inline_bytes: int
) -> None:
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    reranked = await cluster.http.post(
        "/v1/rerank", json={"query": BODY["query"], "documents": CONTEXTS}
    )
    rows = [
        {"id": each["index"], "score": each["relevance_score"]}
        for each in reranked.json()["results"]
    ]
    for top_k, wanted in ((None, rows), (2, rows[:2]), (9, rows)):
        response = await cluster.http.post(RUN, json={**BODY, "top_k": top_k})
        assert response.status_code == 200, response.text
        assert response.json()["success"] and response.json()["result"] == {"response": wanted}


BAD: list[tuple[str, str, str]] = [
    ("query", '""', "query"),
    ("contexts", "null", "contexts"),
    ("contexts", "[]", "contexts"),
    ("contexts", json.dumps([{"text": "a"}] * 1001), "contexts"),
    ("contexts", '[{"text": "a"}, {"text": " "}]', "contexts[1].text"),
    ("contexts", '["a"]', "contexts"),
    ("top_k", "0", "top_k"),
    ("stream", "true", "stream"),
    ("text", '"a"', "query"),
    ("raw", "true", "raw"),
    ("tools", '[{"name": "f", "parameters": {}}]', "tools"),
]


@in_one_test(("field", "value", "named"), BAD)
async def test_bad_field_is_named(cluster: Cluster, field: str, value: str, named: str) -> None:
    data = f'{json.dumps(BODY)[:-1]}, "{field}": {value}}}'
    check_rejected(await cluster.http.post(RUN, content=data), 400, 5004, named)
    assert cluster.scheduler.submits.empty()


async def test_contexts_without_a_query(cluster: Cluster) -> None:
    body = {"prompt": "a", "contexts": BODY["contexts"]}
    check_rejected(await cluster.http.post(RUN, json=body), 400, 5004, "contexts")
