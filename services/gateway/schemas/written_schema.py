"""Writes a client's schema as grammars take it: of an output, and of a tool's arguments in JSON."""

from __future__ import annotations

from typing import Any

from services.gateway.schemas.disjoint import without_disjoint_one_of
from services.gateway.schemas.endless import without_endless
from services.gateway.schemas.enforceable import enforceable


def written_schema(schema: Any, *, is_strict: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The schema without endless parts and what cannot be enforced, and warnings of the latter.
    Raises InvalidRequest for a strict one with such a part.
    """
    finite = {} if schema is True else without_endless(schema)
    if is_strict:
        finite = without_disjoint_one_of(finite)
    return enforceable(finite, is_strict=is_strict)
