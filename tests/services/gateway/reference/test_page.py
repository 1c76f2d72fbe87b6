"""How the reference page writes types, limits and descriptions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from services.gateway.reference.error_meanings import error_rows
from services.gateway.reference.page import groups_of, rendered_page
from services.gateway.reference.schema_text import coded, limits_text, type_text

Number = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Words = Annotated[list[Annotated[str, Meta(max_length=5)]], Meta(max_length=3)]


@pytest.mark.parametrize(
    ("kind", "text", "limits"),
    [
        (Number | None, "integer", "at least 1"),
        (Words | None, "list of text", "items: at most 3, each item: characters: at most 5"),
        (dict[str, Annotated[float, Meta(ge=-1, le=1)]], "object of number", "values -1 to 1"),
        (bool | str | None, "true or false or text", ""),
        (Annotated[str, Meta(min_length=1, max_length=9)], "text", "characters: 1 to 9"),
        (Annotated[float, Meta(gt=0, le=100)], "number", "at most 100, more than 0"),
        (Any, "any JSON", ""),
        (dict[str, Any], "object", ""),
    ],
)
def test_type_and_limits(kind: Any, text: str, limits: str) -> None:
    schema = msgspec.json.schema(kind)
    assert type_text(schema) == text
    assert limits_text(schema) == limits


def test_reference_is_a_link_and_a_value_is_code() -> None:
    assert type_text({"$ref": "#/components/schemas/Leaf"}) == '<a href="#type-Leaf">Leaf</a>'
    assert type_text({"enum": ["a", None]}) == "<code>&#34;a&#34;</code>"


def test_description_cannot_be_markup() -> None:
    assert coded("`<b>` or <i>") == "<code>&lt;b&gt;</code> or &lt;i&gt;"


def test_paths_of_one_operation_are_grouped() -> None:
    operation = {"tags": ["T"], "summary": "Does it", "responses": {"200": {"content": {}}}}
    paths = {path: {"post": operation} for path in ("/do", "/accounts/{a}/v1/do", "/v1/do")}
    tags = [{"name": "T", "description": "A `tag`."}, {"name": "Empty", "description": ""}]
    document = {"paths": paths, "tags": tags, "components": {"schemas": {}}, "info": {"version": 1}}
    group, empty = groups_of(document)
    [only] = group.operations
    assert only.paths == ("/v1/do", "/do", "/accounts/{a}/v1/do")
    assert only.example == 'curl "$URL/v1/do"'
    assert empty.operations == []
    assert b"A <code>tag</code>." in rendered_page(document, error_rows())
