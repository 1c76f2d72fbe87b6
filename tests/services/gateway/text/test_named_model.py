"""Which model a body names, as its first and last values tell, and as all of it does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from services.gateway.text.named_model import model_at_an_edge, named_model

LONG = [{"role": "user", "content": '[{"model":"other"}' * 1000}]
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("model")
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["model", "a", ""]), inner, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny", "messages": LONG},
        {"stream": True, "max_tokens": 5, "user": "a", "model": "tiny", "messages": LONG},
        {"messages": LONG, "model": "tiny"},
        {"messages": LONG, "model": "tiny", "stream": True, "temperature": -0.5, "stop": None},
    ],
    ids=["first", "after short values", "last", "before short values"],
)
@pytest.mark.parametrize("indent", [0, 2])
def test_model_at_an_edge_is_found(body: dict[str, object], indent: int) -> None:
    data = json.format(json.encode(body), indent=indent)
    assert model_at_an_edge(data, "chat") == "tiny"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": LONG, "model": "tiny", "tools": LONG},
        {"messages": LONG, "metadata": {"model": "other"}},
        {"metadata": {"model": "other"}, "messages": LONG},
        {"messages": LONG, "stop": ["model"]},
        {"messages": LONG, "model": None},
        {"messages": LONG, "model": "a\\b"},
        {"messages": LONG},
    ],
    ids=["between", "nested last", "nested first", "a value", "null", "escape", "none"],
)
def test_other_bodies_are_not_judged_by_their_edges(body: dict[str, object]) -> None:
    assert model_at_an_edge(json.encode(body), "chat") is None


def test_model_of_a_body_within_the_body_is_not_at_an_edge() -> None:
    data = json.encode({"model": "other", "request": {"model": "tiny"}})
    assert model_at_an_edge(data, "dry_run") is None
    assert named_model(data, "dry_run") == "tiny"


@given(st.dictionaries(st.sampled_from(["model", "a", "b", "c"]), VALUES, max_size=4))
def test_edges_never_tell_another_model(body: dict[str, object]) -> None:
    data = json.encode(body)
    assert model_at_an_edge(data, "chat") in (None, named_model(data, "chat"))
