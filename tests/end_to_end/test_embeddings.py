"""Embeddings of real workers over HTTP, through OpenAI's SDK."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import openai
import pytest

from tests.end_to_end.cluster import Cluster

TEXTS = ["What is the KV cache?", "How do I start Hearth?", "x"]
RENDER_TIMEOUT = {"max_tokens": 4000, "ignore_eos": True}
EITHER = pytest.mark.parametrize("pooling", ["last", "mean"])


@pytest.fixture(autouse=True)
def leaves_nothing_behind(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_empty()


def embed(cluster: Cluster, given: object, **options: object) -> list[list[float]]:
    answer = cluster.sdk.embeddings.create(
        model=cluster.model,
        input=given,  # type: ignore[arg-type]
        extra_body=options,
    )
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return [each.embedding for each in answer.data]


def length(vector: list[float]) -> float:
    return math.hypot(*vector)


@EITHER
def test_those_of_a_list_are_those_of_each_alone_and_of_length_one(cluster, pooling):
    together = embed(cluster, TEXTS, pooling=pooling)
    assert together == [embed(cluster, text, pooling=pooling)[0] for text in TEXTS]
    assert all(abs(length(vector) - 1) < 1e-6 for vector in together)
    assert len({tuple(vector) for vector in together}) == 3


@EITHER
def test_one_that_is_not_normalised_has_the_same_direction(cluster, pooling):
    (unit,) = embed(cluster, TEXTS[0], pooling=pooling)
    (plain,) = embed(cluster, TEXTS[0], pooling=pooling, normalize=False)
    assert abs(length(plain) - 1) > 0.1
    assert [value / length(plain) for value in plain] == pytest.approx(unit, rel=1e-5)


def test_poolings_differ_unless_there_is_one_token(cluster):
    last, mean = (embed(cluster, TEXTS, pooling=each) for each in ("last", "mean"))
    assert last[0] != mean[0]
    assert last[2] == mean[2]


@EITHER
def test_they_share_steps_with_an_answer_and_neither_changes(cluster, pooling):
    alone = embed(cluster, TEXTS, pooling=pooling)
    expected = "".join(beginning_of(cluster.stream(TEXTS[0], **RENDER_TIMEOUT), 60))
    with contextlib.closing(cluster.stream(TEXTS[0], **RENDER_TIMEOUT)) as stream:
        text = "".join(beginning_of(stream, 30))
        assert embed(cluster, TEXTS * 20, pooling=pooling) == alone * 20
        text += "".join(beginning_of(stream, 30))  # it is not over yet
    assert text.startswith(expected) or expected.startswith(text)


def beginning_of(stream: Iterator[dict], num_chunks: int) -> list[str]:
    """Of an endless answer; how many tokens a chunk has is a matter of time."""
    chunks = [next(stream) for _ in range(num_chunks)]
    return [each["choices"][0]["delta"].get("content", "") for each in chunks]


def test_one_may_fill_the_context(cluster):
    context = cluster.client.get("/v1/models").json()["data"][0]["max_context"]
    assert len(embed(cluster, [5] * context)[0]) == 256
    with pytest.raises(openai.APIStatusError) as refused:
        embed(cluster, [[5], [5] * (context + 1)])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input[1]")
