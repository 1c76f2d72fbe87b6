"""Bounds of bodies: each is a 413 that names its field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.body_budget import BodyBudget
from services.gateway.dialects.openai.chat import CHAT_FIELDS
from services.gateway.dialects.openai.errors import envelope
from services.gateway.dialects.prefixes.bodies import PrefixBody, prompt_of
from services.gateway.http.errors import MAX_MESSAGE_CHARS
from shared.errors import InvalidRequest, Overloaded, PayloadTooLarge

HELLO = {"role": "user", "content": "hello"}


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [HELLO] * 4097}, "messages"),
        (
            {
                "messages": [
                    HELLO,
                    {"role": "user", "content": [{"type": "text", "text": ""}] * 1025},
                ]
            },
            "messages[1].content",
        ),
        ({"messages": [HELLO], "tools": [tool(a=nested(32))]}, "tools"),
        ({"messages": [HELLO], "tools": [tool(a=[0] * 16_384)]}, "tools"),
    ],
)
def test_bounds_of_a_conversation(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(PayloadTooLarge) as caught:
        prompt_of(PrefixBody.fields.decode(json.dumps(fields).encode()))
    assert (caught.value.http_status, caught.value.param) == (413, param)


def test_conversation_at_its_bounds_is_accepted() -> None:
    fields = {"messages": [HELLO] * 4096, "tools": [tool(a=nested(29))]}
    assert len(prompt_of(PrefixBody.fields.decode(json.dumps(fields).encode())).messages) == 4096


@pytest.mark.parametrize(
    "text", [" - at `$.model`", " - at `$", "missing required field `x`", "a\n - at `$.x`\n"]
)
def test_text_of_the_client_is_not_read_as_a_path(text: str) -> None:
    body = json.dumps({"messages": [HELLO, {"role": text, "content": "hello"}]}).encode()
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]\.role: ") as caught:
        CHAT_FIELDS.decode(body)
    assert caught.value.param == "messages[1].role"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"content": "hello"}]}, "messages[0].role"),
        ({"messages": [HELLO], "logit_bias": {"5": "x"}}, "logit_bias"),
        ({"messages": [HELLO], "stop": [1]}, "stop[0]"),
        ([], None),
    ],
)
def test_error_names_the_path_of_the_field(body: object, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CHAT_FIELDS.decode(json.dumps(body).encode())
    assert caught.value.param == param


def test_error_repeats_little_of_the_body() -> None:
    body = json.dumps({"messages": [{"role": "x" * 200_000}]}).encode()
    with pytest.raises(InvalidRequest, match="Invalid enum value 'xxx") as caught:
        CHAT_FIELDS.decode(body)
    error = envelope(caught.value).error
    assert (len(error.message), error.message[-1]) == (MAX_MESSAGE_CHARS, "…")
    assert error.param == "messages[0].role"


def test_neutral_values_are_compared_without_decoding_large_ones() -> None:
    """Values that cannot be neutral are not built: 200,000 lists cost no objects."""
    for value in ("null", "[]", " [ ] "):
        CHAT_FIELDS.decode(b'{"messages": [{"role": "user"}], "functions": %s}' % value.encode())
    value = "[" + ",".join(["[]"] * 200_000) + "]"
    body = b'{"messages": [{"role": "user"}], "functions": %s}' % value.encode()
    with pytest.raises(InvalidRequest) as caught:
        CHAT_FIELDS.decode(body)
    assert caught.value.param == "functions"
    assert isinstance(CHAT_FIELDS._others.decode(body).functions, msgspec.Raw)


def test_body_bytes_of_a_tenant_and_of_the_gateway_are_bounded() -> None:
    budget = BodyBudget(max_tenant_bytes=10, max_gateway_bytes=15)
    first, second, other = budget.body("a"), budget.body("a"), budget.body("b")
    first.add(8)
    with pytest.raises(Overloaded, match="this tenant"):
        second.add(3)
    other.add(7)
    with pytest.raises(Overloaded, match="the gateway"):
        other.add(1)
    for each in (first, first, second, other):
        each.release()
    assert budget.num_bytes == 0 and not budget._by_tenant


@pytest.mark.parametrize(
    ("number", "expected"),
    [("8.0", 8), ("1e3", 1000), ("-0.0", 0), ("8.5", None), ("1e300", None), ("1e400", None)],
)
def test_a_number_without_a_fraction_is_an_integer(number: str, expected: int | None) -> None:
    """In each place that demands one, and in no other: templates see what the client wrote."""
    fields = f'"seed": {number}, "stop_token_ids": [5, {number}], "priority": {number}'
    kwargs = f'"chat_template_kwargs": {{"a": {number.replace("e400", "e3")}, "b": {10**30}}}'
    messages = '"messages": [{"role": "user", "content": "x"}]'
    data = f"{{{messages}, {fields}, {kwargs}}}".encode()
    if expected is None:
        with pytest.raises(InvalidRequest) as refusal:
            CHAT_FIELDS.decode(data)
        assert refusal.value.param == "seed"
        return
    body = CHAT_FIELDS.decode(data)
    assert (body.seed, body.stop_token_ids, body.priority) == (expected, [5, expected], expected)
    assert isinstance(body.chat_template_kwargs["a"], float)
    assert body.chat_template_kwargs["b"] == 10**30


def test_all_numbers_of_an_object_or_array_take_one_pass() -> None:
    numbers = {"seed": 1.0, "n": 2.0, "top_k": 3.0, "min_tokens": 4.0, "priority": 5.0}
    fields = {"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [4.0] * 30}
    body = CHAT_FIELDS.decode(json.dumps({**fields, **numbers, "temperature": 1.0}).encode())
    assert (body.seed, body.n, body.top_k, body.min_tokens, body.priority) == (1, 2, 3, 4, 5)
    assert body.stop_token_ids == [4] * 30
