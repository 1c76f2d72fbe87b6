"""Embeddings over HTTP: a running gateway, real servers, simulated peers on the bus."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.gateway.dialects.openai.embeddings import EmbeddingRequest, to_generation_requests
from services.gateway.output.embedding_vector import normalized
from services.gateway.request import submission
from services.gateway.request.generation_request import check_dimensions
from services.gateway.streams.queued_openings import MAX_OPEN, MAX_TENANT_OPEN
from services.gateway.text.checkpoint.sentence_modules import (
    SentenceModules,
    read_sentence_modules,
)
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.messages import Finish, Request, Served
from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.peer import EMBEDDING
from tests.services.gateway.samples import sample_sum
from tests.services.gateway.streams.test_recovery_http import WAIT_S
from tests.support.grids import in_one_test
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import until

ROUTE = "/v1/embeddings"
UNIT = pytest.approx([0.6, 0.0, -0.8, 0.0])


async def embed(cluster: Cluster, inputs: Any = "the quick fox", **fields: Any) -> Any:
    response = await cluster.http.post(ROUTE, json={"input": inputs, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_response_and_submitted_request(cluster: Cluster) -> None:
    counted = partial(sample_sum, cluster.gateway, "hearth_tokens_total")
    before = [counted(kind=each) for each in ("prompt", "output")]
    body = await embed(cluster)
    request = (await cluster.scheduler.submits.get()).request
    num_tokens = len(unpack_token_ids(request.prompt_token_ids))
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    (entry,) = body["data"]
    assert (entry["object"], entry["index"], entry["embedding"]) == ("embedding", 0, UNIT)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (request.pooling, request.sampling.max_tokens) == ("last", 1)
    assert [choice.choice_index for choice in request.choices] == [0]
    assert counted(kind="prompt") == before[0] + num_tokens
    assert counted(kind="output") == before[1]


async def test_extensions(cluster: Cluster) -> None:
    body = await embed(cluster, pooling="mean", normalize=False, dimensions=4)
    assert body["data"][0]["embedding"] == list(EMBEDDING)
    assert (await cluster.scheduler.submits.get()).request.pooling == "mean"


def of_sentences(folder: Path, *, kind: str = "Normalize", **pooling: Any) -> Path:
    """Writes the files of sentence-transformers beside a model's."""
    write_model_dir(folder)
    own = [("", "Transformer"), ("1_Pooling", "Pooling"), (f"2_{kind}", kind)]
    modules = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{each}"}
        for at, (path, each) in enumerate(own)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": 4, "include_prompt": True, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


MEAN, LAST = "pooling_mode_mean_tokens", "pooling_mode_lasttoken"


@in_one_test(
    ("written", "expected"),
    [
        ({MEAN: False, LAST: True, "pooling_mode_cls_token": False}, SentenceModules("last")),
        ({MEAN: True, LAST: False}, SentenceModules("mean")),
        ({}, SentenceModules("mean")),  # the default of sentence-transformers
        ({"pooling_mode": "lasttoken"}, SentenceModules("last")),
        ({"pooling_mode": ["mean"]}, SentenceModules("mean")),
        ({MEAN: False, "pooling_mode_cls_token": True}, "pooling by cls_token is not supported"),
        ({MEAN: True, LAST: True}, "pooling by mean_tokens and lasttoken is not supported"),
        ({MEAN: False}, "pooling by nothing"),
        ({"kind": "Dense"}, "modules.json has a Dense, which is not supported"),
    ],
)
def test_pooling_of_a_checkpoint(tmp_path: Path, written: dict[str, Any], expected: Any) -> None:
    found = read_sentence_modules(of_sentences(tmp_path, **written))
    assert found is not None
    if isinstance(expected, str):
        assert found.pooling is None and expected in found.reason
    else:
        assert found == expected


def test_modules_that_cannot_be_read(tmp_path: Path) -> None:
    def reason() -> str:
        found = read_sentence_modules(tmp_path)
        assert found is not None and found.pooling is None
        return found.reason

    of_sentences(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert reason() == "cannot read 1_Pooling/config.json: No such file or directory"
    modules = tmp_path / "modules.json"
    modules.write_text(modules.read_text().replace("1_Pooling", ".."))
    assert reason() == "modules.json has no Pooling in a folder of its own, or several"
    modules.write_text("{")
    assert reason() == "cannot read modules.json: Expected `array`, got `object`"
    modules.unlink()
    assert read_sentence_modules(tmp_path) is None


async def test_pooling_is_that_of_the_checkpoint(tmp_path: Path, cluster: Cluster) -> None:
    """In all dialects, unless a request names one."""
    model_dir = of_sentences(tmp_path)
    run = "/accounts/tenant-1/ai/run/tiny"
    pairs = {"query": "a", "documents": ["b"]}

    async def poolings(http: Any, route: str, body: dict[str, Any]) -> set[str | None]:
        del cluster.scheduler.submitted[:]
        response = await http.post(route, json=body)
        assert response.status_code == 200, response.text
        return {each.request.pooling for each in cluster.scheduler.submitted}

    async with cluster.beside(model_dir=model_dir, model_name="tiny") as beside:
        for route, body in ((ROUTE, {"input": "a"}), ("/v1/rerank", pairs), (run, {"text": "a"})):
            assert await poolings(beside.http, route, body) == {"mean"}
        assert await poolings(beside.http, ROUTE, {"input": "a", "pooling": "last"}) == {"last"}
    of_sentences(tmp_path, **{MEAN: False, LAST: True})
    async with cluster.beside(model_dir=model_dir, model_name="tiny") as beside:
        assert await poolings(beside.http, run, {"text": "a"}) == {"last"}
        found = await beside.http.post(run, json={"text": "a"})
        assert found.json()["result"]["pooling"] == "last"


async def test_vectors_of_further_layers_are_refused(tmp_path: Path, cluster: Cluster) -> None:
    model_dir, pairs = of_sentences(tmp_path, kind="Dense"), {"query": "a", "documents": ["b"]}
    async with cluster.beside(model_dir=model_dir, model_name="tiny") as beside:
        for route, body in (
            (ROUTE, {"input": "a"}),
            ("/v1/rerank", pairs),
        ):
            response = await beside.http.post(route, json=body)
            check_envelope(response, 400, "invalid_request", "model")
            assert "a Dense, which is not supported: only requests for emb" in response.text
        response = await beside.http.post(ROUTE, json={"input": "a", "pooling": "last"})
        assert response.status_code == 200


async def test_base64_is_little_endian_fp32(cluster: Cluster) -> None:
    (entry,) = (await embed(cluster, encoding_format="base64"))["data"]
    assert list(array("f", base64.b64decode(entry["embedding"]))) == UNIT


@pytest.mark.parametrize(
    ("inputs", "num_inputs"),
    [(["a", "b c"], 2), ([5, 6], 1), ([[5, 6], [7]], 2), (["a"] * 20, 20)],
)
async def test_input_forms(cluster: Cluster, inputs: Any, num_inputs: int) -> None:
    body = await embed(cluster, inputs)
    assert [entry["index"] for entry in body["data"]] == list(range(num_inputs))
    assert all(entry["embedding"] == UNIT for entry in body["data"])
    assert cluster.scheduler.submits.qsize() == num_inputs


def test_as_many_inputs_as_at_openai() -> None:
    body = EmbeddingRequest(input=["x"] * 2048)
    assert len(to_generation_requests(body, "tiny")) == 2048
    with pytest.raises(PayloadTooLarge, match="limit of 2048"):
        to_generation_requests(EmbeddingRequest(input=["x"] * 2049), "tiny")


@pytest.mark.parametrize(
    ("leaves", "num_free"),
    [(False, 4096), pytest.param(True, 4096, marks=pytest.mark.long), (True, 100)],
)
async def test_inputs_are_submitted_some_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, leaves: bool, num_free: int
) -> None:
    """In their order; those of a client that leaves are not submitted."""
    monkeypatch.setattr(cluster.gateway.capacity, "_max_requests", num_free)
    at_once = min(num_free, MAX_OPEN)
    decode, inputs = cluster.decodes[0], [[5 + number] for number in range(MAX_OPEN + 30)]
    cluster.scheduler.workers = [decode]

    def embedding(request: Request) -> bytes:
        return array("f", [1.0, *unpack_token_ids(request.prompt_token_ids)]).tobytes()

    monkeypatch.setattr(decode, "embedding_for", embedding)
    decode.hold_at = 0
    running = asyncio.create_task(embed(cluster, inputs, normalize=False))
    await until(lambda: len(decode.runs) == at_once)
    assert cluster.scheduler.submits.qsize() == at_once == len(cluster.gateway._driver)
    if leaves:
        running.cancel()
        await until(lambda: not len(cluster.gateway._driver))
        assert cluster.scheduler.submits.qsize() == at_once
        await until(lambda: not cluster.gateway.submission._limits.num_open)
        return
    others = [asyncio.create_task(embed(cluster, [[5]] * 2 * MAX_OPEN)) for _ in range(2)]
    await until(lambda: len(decode.runs) > MAX_TENANT_OPEN)
    assert cluster.scheduler.submits.qsize() == MAX_TENANT_OPEN + 1  # one of the third
    decode.released.set()
    body = await running
    assert [entry["embedding"] for entry in body["data"]] == [[1.0, *each] for each in inputs]
    assert [len((await each)["data"]) for each in others] == [2 * MAX_OPEN] * 2
    assert cluster.scheduler.submits.qsize() == len(inputs) + 4 * MAX_OPEN


async def test_tenant_holds_a_number_of_prompts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are not open yet; a request that is rejected holds none."""
    monkeypatch.setattr(submission, "MAX_PROMPTS", 100)
    decode = cluster.decodes[0]
    cluster.scheduler.workers, decode.hold_at = [decode], 0
    running = asyncio.create_task(embed(cluster, [[5]] * 80))
    await until(lambda: len(decode.runs) == 80)
    for _ in range(2):
        response = await cluster.http.post(ROUTE, json={"input": [[5]] * 21})
        check_envelope(response, 429, "overloaded", None)
    decode.hold_at = None
    assert len((await embed(cluster, [[5]] * 20))["data"]) == 20
    decode.released.set()
    assert len((await running)["data"]) == 80
    response = await cluster.http.post(ROUTE, json={"input": [[5], [400]]})
    check_envelope(response, 400, "invalid_request", "input[1]")
    await until(lambda: not cluster.gateway.submission._num_prompts)


async def test_openai_sdk(cluster: Cluster) -> None:
    async with cluster.openai as client:
        answer = await client.embeddings.create(model="tiny", input=["a", "b"])
    assert [list(each.embedding) for each in answer.data] == [UNIT, UNIT]


@in_one_test(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [400]}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": [[5], [400]]}, "input[1]"),
        ({"dimensions": 3}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"normalize": 1}, "normalize"),
    ],
)
async def test_bad_field(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    response = await cluster.http.post(ROUTE, json={"input": "x", **fields})
    check_envelope(response, 400, "invalid_request", param)
    assert cluster.scheduler.submits.empty()


def test_error_without_a_known_hidden_size() -> None:
    body = EmbeddingRequest(input="x", dimensions=4)
    (generation,) = to_generation_requests(body, "tiny")
    with pytest.raises(InvalidRequest, match="dimensions: must be left out for this model"):
        check_dimensions(generation, None)


async def test_lost_worker_is_replaced(cluster: Cluster) -> None:
    cluster.decodes[0].hold_at = 0
    running = asyncio.create_task(embed(cluster))
    await cluster.scheduler.submits.get()
    await cluster.decodes[0].die()
    async with asyncio.timeout(WAIT_S):
        body = await running
    assert body["data"][0]["embedding"] == UNIT
    assert body["hearth"]["decode_worker"] == "decode-2"


@pytest.mark.parametrize("embedding", [None, b"", b"\0" * 15])
async def test_missing_or_truncated_embedding_fails_the_request(
    cluster: Cluster, embedding: bytes | None
) -> None:
    served = Served(num_cached_tokens=0, prefill_worker_id=None)
    cluster.decodes[0].embedding = embedding
    cluster.decodes[0].finish = Finish(reason="length", served=served)
    response = await cluster.http.post(ROUTE, json={"input": "x"})
    check_envelope(response, 500, "internal_error", None)


def test_normalized_zero_vector_is_zero() -> None:
    assert normalized(array("f", [0.0, 0.0])).tolist() == [0.0, 0.0]
