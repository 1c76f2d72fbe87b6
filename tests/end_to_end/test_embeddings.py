"""Embeddings of real workers over HTTP, through OpenAI's SDK."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import openai
import pytest

from tests.support.cluster.hearth_up import Cluster

TEXTS = ["What is the KV cache?", "How do I start Hearth?", "x"]
LONG_ANSWER = {"max_tokens": 4000, "ignore_eos": True}
BOTH_POOLINGS = pytest.mark.parametrize("pooling", ["last", "mean"])


@pytest.fixture(scope="module", autouse=True)
def all_blocks_are_freed(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_empty()


def embed(cluster: Cluster, inputs: object, **options: object) -> list[list[float]]:
    answer = cluster.sdk.embeddings.create(
        model=cluster.model,
        input=inputs,  # type: ignore[arg-type]
        extra_body=options,
    )
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return [each.embedding for each in answer.data]


def length(vector: list[float]) -> float:
    return math.hypot(*vector)


@BOTH_POOLINGS
def test_list_embeddings_equal_single_ones_with_unit_length(cluster, pooling):
    together = embed(cluster, TEXTS, pooling=pooling)
    assert together == [embed(cluster, text, pooling=pooling)[0] for text in TEXTS]
    assert all(abs(length(vector) - 1) < 1e-6 for vector in together)
    assert len({tuple(vector) for vector in together}) == 3


@BOTH_POOLINGS
def test_unnormalised_embedding_has_the_same_direction(cluster, pooling):
    (unit,) = embed(cluster, TEXTS[0], pooling=pooling)
    (unnormalised,) = embed(cluster, TEXTS[0], pooling=pooling, normalize=False)
    assert abs(length(unnormalised) - 1) > 0.1
    assert [value / length(unnormalised) for value in unnormalised] == pytest.approx(unit, rel=1e-5)


def test_poolings_differ_except_for_one_token(cluster):
    last, mean = (embed(cluster, TEXTS, pooling=each) for each in ("last", "mean"))
    assert last[0] != mean[0]
    assert last[2] == mean[2]


@pytest.mark.each_value(1)
@BOTH_POOLINGS
def test_embeddings_and_a_concurrent_stream_do_not_change(cluster, pooling):
    alone = embed(cluster, TEXTS, pooling=pooling)
    expected = "".join(first_texts(cluster.stream(TEXTS[0], **LONG_ANSWER), 60))
    with contextlib.closing(cluster.stream(TEXTS[0], **LONG_ANSWER)) as stream:
        text = "".join(first_texts(stream, 30))
        assert embed(cluster, TEXTS * 20, pooling=pooling) == alone * 20
        text += "".join(first_texts(stream, 30))  # the stream is still running
    assert text.startswith(expected) or expected.startswith(text)


def first_texts(stream: Iterator[dict], num_chunks: int) -> list[str]:
    """Texts of the first chunks. The number of tokens per chunk varies with timing."""
    chunks = [next(stream) for _ in range(num_chunks)]
    return [each["choices"][0]["delta"].get("content", "") for each in chunks]


@pytest.mark.long
def test_input_may_fill_the_context(cluster):
    context = cluster.client.get("/v1/models").json()["data"][0]["max_context"]
    assert len(embed(cluster, [5] * context)[0]) == 256
    with pytest.raises(openai.APIStatusError) as raised:
        embed(cluster, [[5], [5] * (context + 1)])
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input[1]")


def test_rerank_scores_are_cosines_of_the_embeddings(cluster):
    query, *documents = embed(cluster, TEXTS)
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    results = cluster.client.post("/v1/rerank", json=body).json()["results"]
    for each in results:
        vector = documents[each["index"]]
        cosine = math.fsum(a * b for a, b in zip(query, vector, strict=True))
        assert each["relevance_score"] == pytest.approx(cosine, abs=1e-3)
    assert len(results) == 2
