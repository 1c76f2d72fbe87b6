"""`/rerank` and `/score` over HTTP and NATS: a running gateway, simulated peers on the bus."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from services.gateway.request import prepared_bodies
from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.dialects.ranking.embeddings import (
    cosine_of,
    embedding_of,
    texts_embedded,
)
from tests.services.gateway.nats_api.conftest import Api, api
from tests.services.gateway.peer import PeerDecode
from tests.support.grids import in_one_test

__all__ = ["api"]

PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
QUERY = "the quick fox"
DOCUMENTS = ["the lazy dog", "hello world", "the quick brown fox", "how are you?"]
BODY: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(autouse=True)
def own_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    texts_embedded(monkeypatch)


async def ranked(cluster: Cluster, path: str = PATHS[0], **fields: Any) -> Any:
    response = await cluster.http.post(path, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def expected(cluster: Cluster, documents: list[str] = DOCUMENTS) -> list[tuple[int, float]]:
    """Places and cosines, the best first."""
    encode = cluster.files.tokenizer.encode_text

    def vector(text: str) -> list[float]:
        return embedding_of(encode(text, add_special_tokens=True))

    scores = [cosine_of(vector(QUERY), vector(each)) for each in documents]
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


def found(body: Any) -> list[tuple[int, float]]:
    return [(each["index"], each["relevance_score"]) for each in body["results"]]


@pytest.mark.parametrize("path", PATHS)
async def test_scores_are_cosines_of_last_token_embeddings(cluster: Cluster, path: str) -> None:
    body = await ranked(cluster, path)
    requests = [each.request for each in cluster.scheduler.submitted]
    assert [each.pooling for each in requests] == ["last"] * (1 + len(DOCUMENTS))
    places, scores = zip(*expected(cluster), strict=True)
    assert [place for place, _ in found(body)] == list(places)
    assert [score for _, score in found(body)] == pytest.approx(list(scores), abs=1e-3)
    num_tokens = sum(len(unpack_token_ids(each.prompt_token_ids)) for each in requests)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert body["id"].startswith("rerank-") and body["model"] == "tiny"
    assert not any("document" in each for each in body["results"])


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
async def test_options(cluster: Cluster, monkeypatch: Any, inline_bytes: int) -> None:
    """The same inline as prepared in a process."""
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    documents = [{"text": each} for each in DOCUMENTS]
    body = await ranked(cluster, documents=documents, top_n=2, return_documents=True, model="tiny")
    assert [each["document"] for each in body["results"]] == [
        {"text": DOCUMENTS[place]} for place, _ in expected(cluster)[:2]
    ]
    plain = await ranked(cluster, top_n=10)
    assert [place for place, _ in found(plain)] == [place for place, _ in expected(cluster)]


async def test_equal_documents_keep_their_order(cluster: Cluster) -> None:
    body = await ranked(cluster, documents=["a", "b", "a", "b"])
    places = [place for place, _ in found(body)]
    assert sorted(places[:2]) == places[:2] and sorted(places[2:]) == places[2:]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
async def test_score(cluster: Cluster, monkeypatch: Any, path: str, inline_bytes: int) -> None:
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    by_place = dict(expected(cluster))
    scores = [by_place[place] for place in range(len(DOCUMENTS))]
    for text_1, text_2, wanted in (
        (QUERY, DOCUMENTS, scores),
        ([QUERY] * 4, DOCUMENTS, scores),
        ([QUERY], DOCUMENTS[1], scores[1:2]),
        (QUERY, QUERY, [1.0]),
    ):
        response = await cluster.http.post(path, json={"text_1": text_1, "text_2": text_2})
        body = response.json()
        assert [each["score"] for each in body["data"]] == pytest.approx(wanted, abs=1e-3)
        assert [(each["index"], each["object"]) for each in body["data"]] == [
            (place, "score") for place in range(len(wanted))
        ]
        assert body["object"] == "list" and body["usage"]["total_tokens"] > 0


async def test_body_over_nats_is_that_over_http(api: Api) -> None:
    over_http = await ranked(api.cluster)
    over_nats = await api.client.request("rerank", BODY)
    for name in ("results", "usage", "model"):
        assert over_nats[name] == over_http[name]


async def test_routes_are_documented(cluster: Cluster) -> None:
    paths = (await cluster.http.get("/openapi.json")).json()["paths"]
    for path in (*PATHS, "/v1/score", "/score"):
        assert {"200", "400", "429"} <= set(paths[path]["post"]["responses"]), path


async def test_one_admission_for_all_documents(cluster: Cluster) -> None:
    """100 documents cost a request, and nothing is submitted beside a bad one."""
    body = await ranked(cluster, documents=["the fox"] * 100)
    assert len(body["results"]) == 100
    assert {each.request.request_id.split("-")[0] for each in cluster.scheduler.submitted} == {
        body["hearth"]["request_id"]
    }
    cluster.scheduler.forget()
    response = await cluster.http.post(PATHS[0], json={**BODY, "documents": ["a"] * 99 + [""]})
    check_envelope(response, 400, "invalid_request", "documents[99]")
    assert not cluster.scheduler.submitted


# ── rejections ───────────────────────────────────────────────────────────────────────────────────

BAD: list[tuple[str, str, str]] = [
    ("query", '""', "query"),
    ("query", '" \\n"', "query"),
    ("query", "null", "query"),
    ("query", "[1]", "query"),
    ("documents", "[]", "documents"),
    ("documents", "null", "documents"),
    ("documents", '"a"', "documents"),
    ("documents", json.dumps(["a"] * 1001), "documents"),
    ("documents", '["a", ""]', "documents[1]"),
    ("documents", '["a", 1]', "documents[1]"),
    ("documents", '[{"image": "x"}]', "documents[0].text"),
    ("top_n", "0", "top_n"),
    ("top_n", "1.5", "top_n"),
    ("top_n", "-9223372036854775809", "top_n"),
    ("return_documents", "1", "return_documents"),
    ("instruction", '"find it"', "instruction"),  # only of a reranking model
    ("max_tokens_per_doc", "10", "max_tokens_per_doc"),
    ("rank_fields", '["title"]', "rank_fields"),
    ("truncate_prompt_tokens", "3", "truncate_prompt_tokens"),
]


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
@in_one_test(("field", "value", "param"), BAD)
async def test_bad_field_is_named(
    cluster: Cluster, monkeypatch: Any, field: str, value: str, param: str, inline_bytes: int
) -> None:
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    data = f'{json.dumps(BODY)[:-1]}, "{field}": {value}}}'
    response = await cluster.http.post(PATHS[0], content=data)
    check_envelope(response, 400, "invalid_request", param)
    assert cluster.scheduler.submits.empty()


@in_one_test(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"text_1": "", "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ({"text_1": ["a", ""], "text_2": ["c", "d"]}, "text_1[1]"),
        ({"text_1": "a", "text_2": ["c"] * 1001}, "text_2"),
        ({"text_1": "a", "text_2": {"content": []}}, "text_2"),
    ],
)
async def test_bad_score_field_is_named(cluster: Cluster, body: dict[str, Any], param: str) -> None:
    response = await cluster.http.post("/v1/score", json=body)
    check_envelope(response, 400, "invalid_request", param)
    assert cluster.scheduler.submits.empty()


async def test_too_long_document_is_named(cluster: Cluster) -> None:
    response = await cluster.http.post(PATHS[0], json={**BODY, "documents": ["a", "xq " * 900]})
    check_envelope(response, 400, "context_length_exceeded", "documents[1]")


@pytest.mark.parametrize("embedding", [None, b"", array("f", [float("nan")] * 4).tobytes()])
async def test_missing_embedding_is_an_error(
    cluster: Cluster, monkeypatch: Any, embedding: bytes | None
) -> None:
    monkeypatch.setattr(PeerDecode, "embedding_for", lambda self, request: embedding)
    response = await cluster.http.post(PATHS[0], json=BODY)
    check_envelope(response, 500, "internal_error", None)
