from __future__ import annotations

import pytest

from services.gateway.dialects.workers_ai.model_id import (
    MAX_MODEL_ID_CHARS,
    MalformedModelId,
    parse_model_id,
)
from tests.support.grids import in_one_test


@pytest.mark.parametrize(
    "model_id",
    ["@cf/meta/llama-3.1-8b-instruct", "hearth-demo", "org/name", "..x", "a" * MAX_MODEL_ID_CHARS],
)
def test_id_with_and_without_its_first_slash(model_id: str) -> None:
    assert parse_model_id(f"/{model_id}") == parse_model_id(model_id) == model_id


@in_one_test(
    ("model_id", "problem"),
    [
        ("", "missing"),
        ("/", "missing"),
        ("//a", "empty part"),
        ("@cf//a", "empty part"),
        ("@cf/a/", "empty part"),
        ("@cf/../a", "empty part"),
        ("./a", "empty part"),
        ("a b", "space"),
        ("a\u2003b", "space"),
        ("a\x00", "control character"),
        ("a" * (MAX_MODEL_ID_CHARS + 1), "257 characters"),
        ("a" * 10_240, "10240 characters"),
    ],
)
def test_malformed_id_is_rejected(model_id: str, problem: str) -> None:
    with pytest.raises(MalformedModelId, match=problem) as caught:
        parse_model_id(model_id)
    assert len(caught.value.message) < 400
