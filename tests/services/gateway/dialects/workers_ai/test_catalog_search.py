from __future__ import annotations

import json

import msgspec
import pytest

from services.gateway.dialects.workers_ai.catalog_search import (
    author_of,
    model_rows,
    search_authors,
    search_models,
    search_query,
    search_tasks,
)
from services.gateway.dialects.workers_ai.model_schema import model_schema
from shared.errors import InvalidRequest
from tests.services.gateway.peer import CARD
from tests.support.grids import in_one_test

NAMES = ["tiny", "@cf/meta/llama-3-8b", "@hf/org/other"]
ROWS = model_rows(CARD, NAMES)


def found(**params: str) -> list[str]:
    rows = search_models(ROWS, search_query(params)).result
    return [row.name for row in rows]


def test_row() -> None:
    row = json.loads(msgspec.json.encode(ROWS[1]))
    assert row["name"] == "@cf/meta/llama-3-8b"
    assert row["task"]["name"] == "Text Generation"
    assert row["properties"] == [{"property_id": "context_window", "value": "512"}]
    assert (row["tags"], row["source"]) == ([], 1)
    assert list(row) == [*("id", "name", "description", "task", "properties", "tags", "source")]
    assert row["id"] == model_rows(CARD, [ROWS[1].name])[0].id  # the same on every gateway
    assert len({each.id for each in ROWS}) == 3


@in_one_test(
    ("params", "names"),
    [
        ({}, NAMES),
        ({"search": "LLAMA"}, NAMES[1:2]),
        ({"search": "nothing"}, []),
        ({"task": "text generation"}, NAMES),
        ({"task": ROWS[0].task.id}, NAMES),
        ({"task": "Translation"}, []),
        ({"author": "Meta"}, NAMES[1:2]),
        ({"author": "hearth"}, NAMES[:1]),
        ({"source": "1", "hide_experimental": "true", "unknown": "x"}, NAMES),
        ({"source": "2"}, []),
        ({"per_page": "2"}, NAMES[:2]),
        ({"per_page": "2", "page": "2"}, NAMES[2:]),
        ({"per_page": "2", "page": "3"}, []),
    ],
)
def test_search(params: dict[str, str], names: list[str]) -> None:
    assert found(**params) == names


def test_result_info_counts_the_page_and_all() -> None:
    page = msgspec.to_builtins(search_models(ROWS, search_query({"per_page": "2", "page": "2"})))
    assert page["result_info"] == {"count": 1, "page": 2, "per_page": 2, "total_count": 3}
    assert page["success"] is True


def test_tasks_and_authors() -> None:
    query = search_query({})
    assert [each.name for each in search_tasks(ROWS, query).result] == ["Text Generation"]
    authors = [each.name for each in search_authors(ROWS, query).result]
    assert authors == ["hearth", "meta", "org"]
    assert search_tasks([], query).result == []


@pytest.mark.parametrize(
    ("name", "author"),
    [("tiny", "hearth"), ("@cf/meta/x", "meta"), ("org/x", "org"), ("@cf/x", "hearth")],
)
def test_author(name: str, author: str) -> None:
    assert author_of(name) == author


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page", "0"),
        ("page", "x"),
        ("per_page", "1001"),
        ("source", "one"),
        ("hide_experimental", "maybe"),
        ("format", "openrouter"),
    ],
)
def test_bad_parameter_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        search_query({name: value})
    assert caught.value.param == name


def test_schema_describes_the_decoded_types() -> None:
    schema = model_schema()
    assert schema["input"]["type"] == "object"
    assert schema["input"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 5
    assert schema["output"]["additionalProperties"] is True
    assert {"RunFrame", "EmbeddingResult"} <= set(schema["output"]["$defs"])
