"""Checks values listed by `enum` or `const` against the other keywords of their schema."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import Any, Protocol

import regex

from services.gateway.schemas.document import SchemaDocument
from services.gateway.schemas.shapes import Node, Shape, items, key_of, keys_of, kind_of, members

MATCH_TIMEOUT_S = 0.05


class Alternatives(Protocol):
    @property
    def document(self) -> SchemaDocument: ...

    def count_step(self) -> None: ...

    def alternatives(self, node: Node) -> list[Shape]: ...


def fits(graph: Alternatives, value: Any, shape: Shape) -> bool:
    """Whether the value matches all keywords except `enum` and `const`."""
    kind = kind_of(value)
    if kind not in shape.kinds:
        return False
    match kind:
        case "string":
            return shape.least_chars <= len(value) <= shape.most_chars and all(
                _is_found(pattern, value) for _, pattern in shape.patterns
            )
        case "number":
            return _is_in_bounds(value, shape)
        case "array":
            heads, rest = items(graph.document, shape)
            nodes = [*heads, *[rest] * len(value)][: len(value)]
            return shape.least_items <= len(value) <= shape.most_items and all(
                _matches(graph, each, node) for each, node in zip(value, nodes, strict=True)
            )
        case "object":
            named, required, others = members(graph.document, shape)
            return required <= value.keys() and all(
                _matches(graph, each, named.get(key, () if others is None else others))
                for key, each in value.items()
            )
    return True


def lists_disjoint(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return keys_of(list(left)).isdisjoint(keys_of(list(right)))


def _matches(graph: Alternatives, value: Any, node: Node) -> bool:
    graph.count_step()
    for shape in graph.alternatives(node):
        if shape.keys is None and shape.literals is not None:
            shape.keys = frozenset(keys_of(shape.literals))
        if (shape.keys is None or key_of(value) in shape.keys) and fits(graph, value, shape):
            return True
    return False


def _is_found(pattern: str, text: str) -> bool:
    """Whether the pattern matches in the text. False also if it is invalid or takes longer than
    MATCH_TIMEOUT_S: the value is then not offered to the model.
    """
    try:
        return regex.search(pattern, text, timeout=MATCH_TIMEOUT_S) is not None
    except (regex.error, TimeoutError):
        return False


def _is_in_bounds(value: float, shape: Shape) -> bool:
    bounds = shape.bounds
    divisor = bounds.get("multipleOf")
    return (
        (not shape.is_integer or value == int(value))
        and value >= bounds.get("minimum", value)
        and value <= bounds.get("maximum", value)
        and ("exclusiveMinimum" not in bounds or value > bounds["exclusiveMinimum"])
        and ("exclusiveMaximum" not in bounds or value < bounds["exclusiveMaximum"])
        and (not divisor or isclose(value / divisor, round(value / divisor), abs_tol=1e-9))
    )
