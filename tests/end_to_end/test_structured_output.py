"""Constrained answers and tool calls of real workers: valid, and the same on every way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from services.client.hearth_nats import HearthClient
from tests.support.cluster.hearth_up import Cluster

TENANT = "default"
QUESTION = "What is the KV cache?"
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
            "kind": {"enum": ["block", "page", None]},
        },
        "required": ["name", "sizes", "kind"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-f]{2,6}$"}],
        "items": False,
        "minItems": 2,
    },
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "type": "object",
        "properties": {"head": {"$ref": "#/$defs/node"}, "date": {"format": "date"}},
        "required": ["head", "date"],
        "additionalProperties": False,
    },
]
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "format": {"enum": ["12h", "24h"]},
            },
            "required": ["city", "format"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", autouse=True)
def all_blocks_are_freed(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_empty()


def body_of(question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 2, "seed": 5, "max_tokens": 400, **fields}


def chat(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    response = cluster.client.post("/v1/chat/completions", json=body_of(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(cluster: Cluster, **fields: Any) -> list[dict[str, Any]]:
    body = body_of(stream=True, **fields)
    with cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    json_schema = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": json_schema}


# ── structured output ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_choice_that_stops_is_valid_and_streams_the_same(cluster, schema):
    fields = {"response_format": schema_format(schema), "n": 4}
    choices = chat(cluster, **fields)["choices"]
    streamed = ["", "", "", ""]
    for chunk in chunks_of(cluster, **fields):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == [each["message"]["content"] for each in choices]
    stopped = [each for each in choices if each["finish_reason"] == "stop"]
    assert stopped
    for each in stopped:
        jsonschema_rs.validate(schema, json.loads(each["message"]["content"]))


def test_free_and_constrained_requests_share_a_batch(cluster):
    """The free ones are as without the others."""
    free = chat(cluster, n=2, max_tokens=60)["choices"]
    schema = SCHEMAS[0]
    texts = [[""] * 2, [""] * 2]
    bodies = [body_of(n=2, max_tokens=60), body_of(n=2, response_format=schema_format(schema))]
    streams = [
        cluster.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True})
        for body in bodies
    ]
    with streams[0] as first, streams[1] as second:
        for index, response in enumerate((first, second)):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        delta = choice["delta"].get("content") or ""
                        texts[index][choice["index"]] += delta
    assert texts[0] == [each["message"]["content"] for each in free]
    for text in texts[1]:
        jsonschema_rs.validate(schema, json.loads(text))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
        ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
        ({"structured_outputs": {"choice": ["a cache", "a queue"]}}, "a cache|a queue"),
        ({"guided_grammar": 'start: "<" /[a-c]{1,4}/ ">"'}, "<[a-c]{1,4}>"),
        ({"ebnf": 'root ::= "x" digit digit\ndigit ::= [0-9]'}, "x[0-9]{2}"),
    ],
)
def test_expressions_choices_and_grammars(cluster, fields, pattern):
    (choice,) = chat(cluster, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["message"]["content"])


def test_a_text_completion_is_constrained(cluster):
    body = {"prompt": "The number is ", "regex": "[0-9]{2}", "max_tokens": 20, "temperature": 2}
    response = cluster.client.post("/v1/completions", json=body)
    assert re.fullmatch("[0-9]{2}", response.json()["choices"][0]["text"])


async def test_all_apis_give_the_same_json(cluster: Cluster) -> None:
    schema = SCHEMAS[0]
    openai = chat(cluster, response_format=schema_format(schema))
    run = f"/client/v4/accounts/{TENANT}/ai/run/{cluster.model}"
    response_format = {"type": "json_schema", "json_schema": schema}
    body = body_of(response_format=response_format)
    result = cluster.client.post(run, json=body).json()["result"]
    text = openai["choices"][0]["message"]["content"]
    response = result["response"]
    assert (json.loads(response) if isinstance(response, str) else response) == json.loads(text)
    client = next(each for each in cluster.state.credentials if each.role == "client")
    nats = await HearthClient.connect(
        client.nats_url(cluster.state.nats_host, cluster.state.nats_port)
    )
    try:
        over_nats = await nats.request("chat", body_of(response_format=schema_format(schema)))
    finally:
        await nats.close()
    assert over_nats["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"not": {"type": "string"}})}, "response_format"),
        ({"regex": "[a-"}, "regex"),
        ({"regex": "^(a{1000}){1000}$"}, "regex"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_rejected_by_name(cluster, fields, param):
    response = cluster.client.post("/v1/chat/completions", json=body_of(**fields))
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "").startswith(param)


def test_keywords_that_are_not_enforced_are_named(cluster):
    schema = {"type": "object", "properties": {}, "not": {"required": ["a"]}}
    answer = chat(
        cluster,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
        max_tokens=100,
    )
    assert any("not" in each for each in answer["hearth"]["warnings"])


# ── tools ────────────────────────────────────────────────────────────────────────────────────────


def test_a_forced_call_is_valid_and_streams_the_same(cluster):
    fields = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = chat(cluster, **fields)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    arguments = call["function"]["arguments"]
    assert call["function"]["name"] == "clock"
    jsonschema_rs.validate(CLOCK["function"]["parameters"], json.loads(arguments))
    deltas = [
        delta
        for chunk in chunks_of(cluster, **fields)
        for each in chunk["choices"]
        for delta in each["delta"].get("tool_calls") or []
    ]
    assert deltas[0]["id"].startswith("call_")
    assert deltas[0]["function"]["name"] == "clock"
    assert "".join(each["function"].get("arguments", "") for each in deltas) == arguments


def test_without_a_choice_of_tools_none_is_called(cluster):
    (choice,) = chat(cluster, tools=[CLOCK], tool_choice="none")["choices"]
    assert not choice["message"].get("tool_calls")


def test_a_history_with_calls_and_results_is_taken(cluster):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"city": "Oslo", "format": "24h"}'},
    }
    messages = [
        {"role": "user", "content": "What time is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "14:05"},
    ]
    answer = chat(cluster, messages=messages, tools=[CLOCK], temperature=0)
    assert answer["choices"][0]["message"]["content"]
