"""Constrained outputs over HTTP: the grammar on the wire, warnings and errors of the client."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.errors import GrammarFailed
from shared.grammar.spec import GRAMMAR_FEATURE, GrammarSpec
from shared.messages import Failure, Request
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, events_of
from tests.support.grids import in_one_test

COMPLETIONS, RUN = "/v1/completions", "/client/v4/accounts/tenant-1/ai/run/tiny"
BODIES: dict[str, dict[str, Any]] = {CHAT: BODY, COMPLETIONS: {"prompt": "hi"}, RUN: BODY}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}}
UNSUPPORTED: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
OPTIONS = {"lenient": True, "whitespace_pattern": r"[ \t\n\r]{0,4}"}


async def sent(cluster: Cluster, **fields: Any) -> Request:
    path = fields.pop("path", CHAT)
    response = await cluster.http.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return (await cluster.scheduler.submits.get()).request


def strict(schema: Any) -> dict[str, Any]:
    wrapped = {"name": "n", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


@pytest.mark.parametrize("path", BODIES)
async def test_schema_on_the_wire(cluster: Cluster, path: str) -> None:
    request = await sent(
        cluster, path=path, response_format={"type": "json_schema", "json_schema": SCHEMA}
    )
    grammar = request.sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    assert msgspec.json.decode(grammar.source) == {**SCHEMA, "x-guidance": OPTIONS}
    assert (grammar.starts_after, grammar.is_required, grammar.repeats) == ((), True, False)
    assert request.needs == (GRAMMAR_FEATURE,)


async def test_every_kind_on_the_wire(cluster: Cluster) -> None:
    async def grammar(**fields: Any) -> GrammarSpec:
        found = (await sent(cluster, **fields)).sampling.grammar
        assert found is not None
        return found

    assert await grammar(regex="a+") == GrammarSpec(kind="regex", source="a+")
    choices = await grammar(structured_outputs={"choice": ["a", "b"]})
    assert choices == GrammarSpec(kind="lark", source='start: "a" | "b"')
    converted = await grammar(ebnf='root ::= "a"')
    assert converted.kind == "lark" and 'start: "a"' in converted.source
    exact = await grammar(**strict(SCHEMA))
    assert msgspec.json.decode(exact.source)["x-guidance"] == {**OPTIONS, "lenient": False}


async def test_free_output_needs_nothing(cluster: Cluster) -> None:
    request = await sent(cluster, response_format={"type": "text"})
    assert (request.sampling.grammar, request.needs) == (None, ())


async def test_ignored_keyword_is_a_warning(cluster: Cluster) -> None:
    response = await cluster.http.post(CHAT, json={**BODY, "guided_json": UNSUPPORTED})
    (warning,) = response.json()["hearth"]["warnings"]
    assert warning.startswith("guided_json: ") and warning.endswith("/properties/a/not")
    plain = await cluster.http.post(CHAT, json={**BODY, "guided_json": SCHEMA})
    assert "warnings" not in plain.json()["hearth"]
    options = {"stream_options": {"include_usage": True}}
    events = await events_of(cluster, guided_json=UNSUPPORTED, **options)
    assert events[-2]["hearth"]["warnings"] == [warning]


@in_one_test(
    ("fields", "param", "code", "part"),
    [
        (
            strict(UNSUPPORTED),
            "response_format.json_schema.schema",
            "invalid_request",
            "/properties/a/not",
        ),
        ({"regex": "a(?=b)"}, "regex", "invalid_request", "look-ahead"),
        ({"ebnf": "root ::= ::="}, "ebnf", "invalid_request", "Expected name"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "invalid_request", "cannot be satisfied"),
        # Which limit it meets first, of expressions or of CPU time, is up to the machine.
        ({"regex": "^(.{1,5000}){1,500}$"}, "regex", "grammar_too_complex", "regex: "),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "invalid_request", "regex"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens", "invalid_request", "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "invalid_request", "regex"),
        ({"structural_tag": {}}, "structural_tag", "invalid_request", "structural_tag"),
    ],
)
async def test_bad_constraint_is_refused(
    cluster: Cluster, fields: dict[str, Any], param: str, code: str, part: str
) -> None:
    response = await cluster.http.post(CHAT, json={**BODY, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
    assert part in error["message"]
    assert cluster.scheduler.submits.empty()


@pytest.mark.parametrize("fields", [{"echo": True}, {"best_of": 3}, {"suffix": "x"}])
async def test_bad_combination_in_a_completion(cluster: Cluster, fields: dict[str, Any]) -> None:
    body = {**BODIES[COMPLETIONS], "guided_regex": "a", **fields}
    response = await cluster.http.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))


async def test_choices_and_prompts_share_the_grammar(cluster: Cluster) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 2, "regex": "a"}
    response = await cluster.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200 and len(response.json()["choices"]) == 4
    grammars = [(await cluster.scheduler.submits.get()).request.sampling.grammar for _ in "ab"]
    assert grammars == [GrammarSpec(kind="regex", source="a")] * 2


def failing(cluster: Cluster, index: int) -> None:
    """The grammar of this choice fails at its end; the others are whole."""
    failure = Failure(code=GrammarFailed.code, message="too complex")
    for decode in cluster.decodes:
        decode.finishes[index] = msgspec.structs.replace(
            decode.finish, reason="failed", failure=failure
        )
        decode.answers[index] = cluster.answer[:3]


async def test_failed_choice_is_cut_beside_whole_ones(cluster: Cluster) -> None:
    failing(cluster, 1)
    fields = {"n": 3, "regex": "a+", "max_tokens": 100}
    body = (await cluster.http.post(CHAT, json={**BODY, **fields})).json()
    found = [(each["message"]["content"], each["finish_reason"]) for each in body["choices"]]
    cut = cluster.files.tokens.decode(cluster.answer[:3])
    assert found == [(ANSWER, "stop"), (cut, "length"), (ANSWER, "stop")]
    assert body["hearth"]["warnings"] == ["choices[1] is cut: too complex"]
    events = await events_of(cluster, **fields)
    reasons = {
        each["index"]: each["finish_reason"]
        for event in events[:-1]
        for each in event["choices"]
        if each["finish_reason"]
    }
    assert reasons == {0: "stop", 1: "length", 2: "stop"}


async def test_failed_only_choice_is_an_error(cluster: Cluster) -> None:
    failing(cluster, 0)
    response = await cluster.http.post(CHAT, json={**BODY, "regex": "a+"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_failed")
