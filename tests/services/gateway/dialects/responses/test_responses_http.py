"""The Responses API over HTTP: a running gateway, real servers, simulated peers on the bus."""

from __future__ import annotations

from typing import Any

import pytest
from openai import NotFoundError

from services.gateway.request import prepared_bodies
from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.responses.events import (
    STRICT_RESPONSE,
    events_of,
    joined_deltas,
)
from tests.support.grids import in_one_test

PATH = "/v1/responses"


async def created(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    response = await cluster.http.post(PATH, json={"input": "hi", **fields})
    assert response.status_code == 200, response.text
    STRICT_RESPONSE.validate_json(response.content)
    body: dict[str, Any] = response.json()
    return body


async def streamed(cluster: Cluster, **fields: Any) -> list[dict[str, Any]]:
    response = await cluster.http.post(PATH, json={"input": "hi", "stream": True, **fields})
    assert response.headers["content-type"] == "text/event-stream", response.text
    return events_of(response.content)


async def prompt_of(cluster: Cluster) -> list[int]:
    request = (await cluster.scheduler.submits.get()).request
    return list(unpack_token_ids(request.prompt_token_ids))


async def test_whole_response(cluster: Cluster) -> None:
    body = await created(cluster, metadata={"a": "b"})
    (message,) = body["output"]
    assert message["content"][0]["text"] == ANSWER
    assert (body["status"], body["model"], body["metadata"]) == ("completed", "tiny", {"a": "b"})
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 4


async def test_stream(cluster: Cluster) -> None:
    events = await streamed(cluster)
    assert joined_deltas(events, "output_text") == ANSWER
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ANSWER


async def test_logprobs(cluster: Cluster) -> None:
    include = ["message.output_text.logprobs"]
    events = await streamed(cluster, include=include, top_logprobs=2)
    (message,) = events[-1]["response"]["output"]
    logprobs = message["content"][0]["logprobs"]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [one for each in deltas for one in each["logprobs"]] == logprobs
    assert {len(each["top_logprobs"]) for each in logprobs} == {2}
    body = await created(cluster, include=include)
    assert len(body["output"][0]["content"][0]["logprobs"]) == len(logprobs)


@pytest.mark.parametrize("max_inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 0])
async def test_next_response_has_the_items_of_those_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, max_inline_bytes: int
) -> None:
    """A large body, and what it refers to, are put together in a preparation process."""
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", max_inline_bytes)
    first = await created(cluster, instructions="not inherited", max_output_tokens=3)
    await prompt_of(cluster)
    text = first["output"][0]["content"][0]["text"]
    await created(cluster, input="again", previous_response_id=first["id"])
    shown = await prompt_of(cluster)
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "again"},
    ]
    await created(cluster, input=conversation)
    assert await prompt_of(cluster) == shown
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    await created(cluster, input=[conversation[0], reference, conversation[2]])
    assert await prompt_of(cluster) == shown
    reference["id"] = reference["id"][:-4] + "ffff"
    response = await cluster.http.post(PATH, json={"input": [reference]})
    assert response.status_code == 404 and response.json()["error"]["param"] == "input[0].id"


async def test_stored_response(cluster: Cluster) -> None:
    client = cluster.openai
    first = await client.responses.create(model="tiny", input="hi", store=True)
    assert first.output_text == ANSWER
    found = await client.responses.retrieve(first.id)
    assert found.to_dict() == first.to_dict()
    items = await client.responses.input_items.list(first.id)
    assert [each.to_dict()["content"] for each in items.data] == [
        [{"type": "input_text", "text": "hi"}]
    ]
    response = await cluster.http.post(f"{PATH}/{first.id}/cancel")
    assert response.status_code == 400
    await client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        await client.responses.retrieve(first.id)


async def test_input_items_in_pages(cluster: Cluster) -> None:
    items = [{"role": "user", "content": each} for each in "abc"]
    body = await created(cluster, input=items)
    path = f"{PATH}/{body['id']}/input_items"
    page = (await cluster.http.get(path, params={"limit": 2, "order": "asc"})).json()
    assert [each["content"][0]["text"] for each in page["data"]] == ["a", "b"]
    assert page["has_more"] is True
    rest = await cluster.http.get(path, params={"after": page["last_id"], "order": "asc"})
    assert [each["content"][0]["text"] for each in rest.json()["data"]] == ["c"]
    for bad in (
        {"limit": "0"},
        {"limit": "0100999"},
        {"limit": "x"},
        {"order": "up"},
        {"after": "no"},
    ):
        refusal = await cluster.http.get(path, params=bad)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, next(iter(bad)))


async def test_response_that_is_not_stored(cluster: Cluster) -> None:
    body = await created(cluster, store=False)
    assert body["store"] is False
    response = await cluster.http.get(f"{PATH}/{body['id']}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")],
)
@in_one_test("response_id", ["resp_" + "0" * 32, "x", "resp_%00"])
async def test_unknown_response(cluster: Cluster, method: str, path: str, response_id: str) -> None:
    response = await cluster.http.request(method, f"{PATH}/{response_id}{path}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "response_not_found"


@pytest.mark.parametrize("max_inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 0])
async def test_refusals(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, max_inline_bytes: int
) -> None:
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", max_inline_bytes)
    unknown = "resp_" + "0" * 32
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"background": True}, 400, "background"),
        ({"previous_response_id": unknown}, 404, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "input[0].id"),
        ({"hearth_history": []}, 400, "hearth_history"),
        ({"hearth_tools": []}, 400, "hearth_tools"),
        ({"input": [{"role": "assistant", "content": "a"}]}, 400, "input"),  # by the template
    ]
    for fields, status, param in cases:
        response = await cluster.http.post(PATH, json={"input": "hi", **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
    for path in (f"{PATH}/compact", "/v1/conversations"):
        assert (await cluster.http.post(path, json={})).status_code == 400
    response = await cluster.http.get(f"{PATH}/{unknown}", params={"stream": "true"})
    assert response.json()["error"]["param"] == "stream"


async def test_input_tokens_are_those_of_the_request(cluster: Cluster) -> None:
    fields = {"input": "hi", "instructions": "Be brief."}
    counted = (await cluster.http.post(f"{PATH}/input_tokens", json=fields)).json()
    body = await created(cluster, **fields)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": body["usage"]["input_tokens"],
    }
    again = {"input": "x", "previous_response_id": body["id"]}
    counted = (await cluster.http.post(f"{PATH}/input_tokens", json=again)).json()
    body = await created(cluster, **again)
    assert counted["input_tokens"] == body["usage"]["input_tokens"]
